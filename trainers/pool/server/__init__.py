"""The process that keeps a pool of GPUs."""
