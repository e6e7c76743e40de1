"""Connects a client to the directory in another process."""
