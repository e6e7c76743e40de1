"""Trains the policy: configuration, losses, train backends, controllers, and the run around them."""
