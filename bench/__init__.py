"""Floor 5: measures what the floors below do, against other ways to do it, and writes it up."""
