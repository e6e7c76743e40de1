"""Simulates GRPO runs to predict step times and the idle time of trainer and engines, by mode and number of GPUs."""
