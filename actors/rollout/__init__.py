"""Rollout: the actor that turns prompts into rewarded rows, its journal, and the prompt stream."""
