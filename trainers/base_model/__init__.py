"""The base model of a run: a folder, a hub id, or a tiny one made and warmed up on the spot."""
