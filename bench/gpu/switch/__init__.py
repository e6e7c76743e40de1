"""Measures switches of roles on GPUs: what each side of a GPU that both roles share has to wait for."""
