"""Holds the version of Headrace, in a module that imports nothing."""

__version__ = "0.3.0"
