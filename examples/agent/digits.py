"""The reward of the examples of agents: the share of digits in what the policy says, which a tiny model can learn."""

from collections.abc import Iterable


def share_of_digits(texts: Iterable[str]) -> float:
    """Return the share of digits among all characters."""
    text = "".join(texts)
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
