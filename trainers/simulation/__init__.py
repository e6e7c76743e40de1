"""Simulates GRPO runs to predict how long a step takes and what waits, for each mode and number of GPUs."""
