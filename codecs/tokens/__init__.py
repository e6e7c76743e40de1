"""Handles rows of tokens: padding, slices of context-parallel ranks, and routes."""
