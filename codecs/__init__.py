"""Converts between batches and bytes, by pure functions. The lowest floor of the package."""
