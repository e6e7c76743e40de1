"""The processes of a run: where they are placed, how they are started, called and replaced."""
