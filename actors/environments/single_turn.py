"""The `single_turn` environment samples n answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .episode import Episode, generate_together


class SingleTurn:
    """Plays episodes of one turn: a sample is the prompt followed by one completion."""

    async def play_group(self, episodes: Sequence[Episode]) -> None:
        """Let the policy answer the prompt once in each of the episodes."""
        await generate_together(episodes)
