"""GPUs that several runs share: the state of a pool, its server, a run as its tenant, its report and its simulation."""
