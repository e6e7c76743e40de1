"""Measures supervised runs, whose steps are those of any other run."""
