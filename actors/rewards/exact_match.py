"""The `exact_match` reward: 1 when the response is the answer."""

from __future__ import annotations

from ..protocols import Prompt


def exact_match(prompt: Prompt, response: str, finish_reason: str) -> float:
    """1.0 when `response` equals `prompt.answer`, both stripped of surrounding white space, else 0.0.

    Raises ValueError when the prompt has no answer to compare with.
    """
    if not prompt.answer:
        raise ValueError(f"prompt {prompt.uid!r} has no answer to compare with")
    return float(response.strip() == prompt.answer.strip())
