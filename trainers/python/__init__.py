"""Trains from a script or notebook, with objects and rows of that script instead of paths."""
