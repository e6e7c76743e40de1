"""Converts batches of rows and model weights to bytes and back. Imports no other part of the package."""
