"""Floor 4: the algorithm, its backends, its controllers and the command line."""
