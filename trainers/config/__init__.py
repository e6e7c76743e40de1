"""The configuration of a run: its sections, how it is loaded, and what is checked."""
