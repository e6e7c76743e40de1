"""Measures two runs that share the GPUs of a pool, against one that has the same GPUs to itself."""
