"""Measures whole training runs and switches of roles on GPUs, and accounts for every second of a step."""
