"""The endpoint serves the policy over HTTP, with one module for each dialect that clients speak."""
