"""Checks a run before it starts: dry run, doctor, extras, GPUs, and the agreement of engine and trainer."""
