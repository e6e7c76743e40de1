"""Implements the store `tcp`: our own storage units, one on each host that produces rows, and their clients."""
