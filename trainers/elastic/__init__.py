"""Changes the number of a run's engines while it goes on."""
