"""Rewards, one file each, and the rubric that weighs them."""
