"""Trains the policy: configuration, losses, train backends, training modes, and the run around them."""
