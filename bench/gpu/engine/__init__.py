"""Measures what one engine on a GPU gains or loses by log-probs and by recording the routes of its experts."""
