"""Optimizers of the train backends: their kinds, the groups of their parameters, and their learning rates."""
