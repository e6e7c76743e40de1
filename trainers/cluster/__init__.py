"""The processes of a run: where they are placed, and how they are started, called and replaced."""
