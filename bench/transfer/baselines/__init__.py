"""The baselines that stores are compared with, each another way to bring the same rows from process to process."""
