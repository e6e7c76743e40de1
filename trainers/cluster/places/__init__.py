"""Places of a run's actors on the hosts and GPUs of a Ray cluster, from plain data and without Ray."""
