"""Floor 2: where rows live between producer and consumer."""
