"""Benchmarks of the folders below, measured against other ways to do the same."""
