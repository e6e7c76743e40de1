"""The `per_position` reward: partial credit, character by character."""

from __future__ import annotations

from ..protocols import Prompt


def per_position(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Share, 0.0 to 1.0, of positions at which the stripped response and answer agree.

    The longer of the two is the whole, so characters that are missing or too many count as wrong; both empty is 1.0.
    """
    given, expected = response.strip(), prompt.answer.strip()
    whole = max(len(given), len(expected))
    return sum(a == b for a, b in zip(given, expected, strict=False)) / whole if whole else 1.0
