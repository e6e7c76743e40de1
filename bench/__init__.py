"""Benchmarks of the library's parts, compared with other ways to do the same work."""
