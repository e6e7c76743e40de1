"""Compares the hosts of a run, or of a whole Ray cluster, with each other."""
