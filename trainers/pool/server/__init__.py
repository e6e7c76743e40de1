"""Implements the process that keeps a pool of GPUs."""
