"""Prepares the base model of a run: a folder, a hub id, or a built-in tiny model that is made and warmed up."""
