"""Declares the configuration of a run, loads it and checks it."""
