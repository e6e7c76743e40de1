"""Packs weight tensors into byte buffers (buckets) and unpacks them, on CPUs and GPUs, in full or as differences."""
