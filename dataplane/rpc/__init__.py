"""Carries requests from clients to the directory, which runs in another process or in a thread of the same one."""
