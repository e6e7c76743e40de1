"""A run as a tenant of a pool of GPUs."""
