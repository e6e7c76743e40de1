"""Rollout: the actor that turns prompts into rewarded rows, with its prompt stream and its journal."""
