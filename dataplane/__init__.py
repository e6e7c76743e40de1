"""Keeps rows between the processes that produce them and those that consume them. The package's second layer."""
