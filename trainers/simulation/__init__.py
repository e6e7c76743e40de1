"""Simulates GRPO runs to predict the time of a step and the idle time of trainer and engines, by mode and number of
GPUs."""
