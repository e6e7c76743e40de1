"""Sends a version from all trainer ranks at once, each its part of the transfer plan, over TCP between CPUs."""
