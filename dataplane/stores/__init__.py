"""Holds the block stores, in one file each."""
