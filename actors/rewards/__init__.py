"""Rewards: the built-in reward functions, and the rubric that adds rewards up to one score."""
