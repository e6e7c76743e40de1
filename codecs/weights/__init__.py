"""Packs weight tensors into buckets of bytes and takes them out again, on CPUs and on GPUs, whole or as differences."""
