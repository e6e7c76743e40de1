"""The GRPO algorithm: its steps, the controllers that string them together, and what they keep between steps."""
