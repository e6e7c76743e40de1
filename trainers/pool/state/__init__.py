"""Implements the state of a pool of GPUs and the plans that change it, without a clock or a process."""
