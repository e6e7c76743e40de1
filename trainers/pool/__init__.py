"""Shares GPUs between several runs: the state of a pool, its server and trace, its tenants, and its simulation."""
