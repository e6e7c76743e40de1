"""Losses: each returns sums and declares its denominator."""
