"""GPUs that several runs share: the state of a pool, its server and trace, a run as its tenant, and its simulation."""
