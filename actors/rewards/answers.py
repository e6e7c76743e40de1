"""Finds the final answer in a response, and compares it with the expected answer as text (reward `boxed`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the processes of math_verify import this module, and have no use for torch
    from ..protocols import Prompt

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` (or `\fbox{...}`) in `text`. Braces in it are balanced,
    and white space around it is removed. Returns None if there is none."""
    for box in reversed(list(_BOX.finditer(text))):
        depth, index = 1, box.end()
        while index < len(text):
            character = text[index]
            if character == "\\":
                index += 2  # an escaped brace, such as that of a set, opens and closes nothing
                continue
            depth += (character == "{") - (character == "}")
            if not depth:
                return text[box.end() : index].strip()
            index += 1
    return None


def without_space(text: str) -> str:
    """Return `text` without any white space and without dollar signs around it. Two answers that differ only in these
    count as equal."""
    return "".join(text.split()).strip("$")


def expected_answer(prompt: Prompt) -> str:
    """Return the expected answer of a prompt. Raises ValueError if it has none to compare with."""
    if not prompt.answer:
        raise ValueError(f"prompt {prompt.uid!r} has no answer to compare with")
    return prompt.answer


class Boxed:
    r"""Reward of 1.0 when the response's last `\boxed{...}` holds the expected answer, else 0.0. White space is
    ignored."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """Return the reward. An expected answer that is itself boxed is compared by its content. Raises ValueError when
        the prompt has no answer."""
        expected = expected_answer(prompt)
        content = last_boxed(expected)
        return float(self.answer_of(response) == without_space(expected if content is None else content))

    def answer_of(self, response: str) -> str | None:
        """Return the answer that a response votes for in a majority vote; None if it boxes none."""
        found = last_boxed(response)
        return None if found is None else without_space(found)
