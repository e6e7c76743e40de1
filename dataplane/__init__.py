"""Stores rows between the processes that produce and consume them. Builds only on `codecs`."""
