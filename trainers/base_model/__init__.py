"""Prepares the base model of a run: a folder, a hub id, or the built-in tiny model."""
