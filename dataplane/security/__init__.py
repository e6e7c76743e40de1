"""Decides who may use what a data plane listens on: those who prove that they know the run's key."""
