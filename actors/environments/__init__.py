"""Environments: one module for each; all implement the protocol `Environment`."""
