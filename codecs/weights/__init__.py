"""Packs weight tensors into byte buffers (buckets) and unpacks them, on CPUs and GPUs, whole or as differences."""
