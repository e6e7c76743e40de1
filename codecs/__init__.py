"""Converts batches of rows and model weights to bytes and back by pure functions. The package's lowest layer."""
