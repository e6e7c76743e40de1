"""A run from start to end: launch, dry run, restarts, replay, and the checks of the machine."""
