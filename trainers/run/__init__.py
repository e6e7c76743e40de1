"""Carries out a run from start to end: checks, launch, restarts, and replay of rollouts."""
