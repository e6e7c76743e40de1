"""What the backends know about each family of models: its weights, its settings, and what of it they cannot train."""
