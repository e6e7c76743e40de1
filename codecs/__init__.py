"""Floor 1: pure functions between a batch and its bytes."""
