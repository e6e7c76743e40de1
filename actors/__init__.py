"""Floor 3: Ray processes and what they host."""
