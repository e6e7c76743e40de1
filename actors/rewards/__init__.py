"""Rewards: the built-in reward functions, and the rubric that combines reward functions into one score."""
