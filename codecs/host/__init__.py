"""Tells what this host has and what processes of it own: memory, folders and locks."""
