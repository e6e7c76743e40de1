"""Implements the store `tcp`: a storage unit on each host that produces rows, and the clients of the units."""
