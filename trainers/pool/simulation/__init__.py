"""Simulates a pool of GPUs without GPUs and in virtual time."""
