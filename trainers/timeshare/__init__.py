"""Lets several runs share one pool of GPUs: engines sleep while their GPUs train, and wake when these are free."""
