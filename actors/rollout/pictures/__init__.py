"""Puts the pictures of prompts and episodes into rows of the data plane."""
