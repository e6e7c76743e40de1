"""Holds the directory, which knows which rows exist, where their bytes are, and which client may read them next."""
