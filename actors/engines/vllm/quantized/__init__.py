"""Runs vLLM with 8-bit weights that the trainer quantizes, and reads them back to compare them with the trainer's."""
