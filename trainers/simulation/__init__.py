"""A GRPO run without its work: how long a step takes, and who waits, by mode and size."""
