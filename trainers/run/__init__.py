"""A run from start to end: launch, dry run, restarts, replay of rollouts, and the checks before it starts."""
