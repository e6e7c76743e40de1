"""Holds the baselines of the transfer benchmark: other ways to bring the same rows from process to process."""
