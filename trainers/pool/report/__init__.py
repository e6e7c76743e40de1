"""Calls, traces and pictures of a pool of GPUs."""
