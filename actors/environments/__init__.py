"""Environments: one module for each, all behind the protocol `Environment`."""
