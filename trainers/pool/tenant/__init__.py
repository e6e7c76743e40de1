"""Makes a run a tenant of a pool of GPUs."""
