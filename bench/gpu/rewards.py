"""Scores samples of the benchmark's runs at almost no cost, so that the time that is measured is that of the run."""

from __future__ import annotations

from ...actors.protocols import Prompt


def spread(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return a number in [0, 1] that depends on the first characters of the response. The samples of a group then
    differ and every step has a gradient."""
    return (sum(map(ord, response[:40])) % 11) / 10.0
