"""Builds the pages that show runs: the report, the live page and the comparison, which work without a network."""
