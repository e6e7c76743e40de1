"""Holds the block stores, which keep the bytes of the rows. Each kind of store has a separate module."""
