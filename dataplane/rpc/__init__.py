"""Carries requests from clients to the directory (the metadata service), in another process or in a thread."""
