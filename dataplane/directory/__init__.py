"""Holds the directory, which knows which rows exist, where their bytes are, and who may read them next."""
