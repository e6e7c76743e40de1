"""Simulates GRPO runs to predict step times and idle times for each mode and number of GPUs."""
