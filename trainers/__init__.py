"""The algorithm: configuration, losses, backends, controllers, and the run around them."""
