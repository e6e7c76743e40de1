"""Controllers: short loops over the steps in grpo.py."""
