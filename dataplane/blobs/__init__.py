"""Stores large values that many rows refer to, such as pictures, once, and frees each with the last row."""
