"""Stores rows between the processes that produce them and those that consume them. Builds only on `codecs`."""
