"""The directory: which rows exist, where their bytes are, and who may read them next."""
