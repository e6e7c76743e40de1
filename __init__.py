"""Headrace: RL post-training for language models, built around its data plane."""

__version__ = "0.1.0"
