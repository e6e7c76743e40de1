"""Evens out the use of experts in training: an auxiliary loss, biases of the routers, and metrics of their load."""
