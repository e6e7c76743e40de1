"""Built-in tasks generate prompts and answers from a seed, so that nothing needs to be downloaded.

A task has a training part and a held-out part, which never share a prompt: a prompt is held out when the hash of its
text falls into the first of ten buckets. Both parts are endless, and prompt i is a function of (seed, part, i).
"""

from __future__ import annotations

import difflib
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ..protocols import PromptRow

_HELD_OUT_BUCKETS = 10
_TRIES = 10_000


def reverse(rng: random.Random, *, min_digits: int = 3, max_digits: int = 8) -> PromptRow:
    """Make a prompt like `r48213=` with answer `31284`. Lengths from min_digits to max_digits are equally likely."""
    digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
    return PromptRow(f"r{digits}=", digits[::-1], {"num_digits": len(digits)})


def arithmetic(rng: random.Random, *, min_digits: int = 1, max_digits: int = 2) -> PromptRow:
    """Make a prompt like `12+30=` with answer `42`. The two numbers have no leading zeros, and their lengths from
    min_digits to max_digits are equally likely."""
    left, right = (_number(rng, rng.randint(min_digits, max_digits)) for _ in range(2))
    return PromptRow(f"{left}+{right}=", str(left + right), {"left": left, "right": right})


def _number(rng: random.Random, num_digits: int) -> int:
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


TASKS: dict[str, Callable[..., PromptRow]] = {"reverse": reverse, "arithmetic": arithmetic}


def is_held_out(text: str) -> bool:
    """Return whether a prompt belongs to the held-out part of its task. The answer does not depend on the seed."""
    return zlib.crc32(text.encode()) % _HELD_OUT_BUCKETS == 0


ENVIRONMENT = "environment"
"""Source of prompts that stand for tasks of the environment's own, by their numbers."""


class EnvironmentTasks:
    """PromptSource of an environment that has tasks of its own: prompt i is the number of a task.

    Every tenth task is held out for validation. The number is the prompt's field `task`, and its text.
    """

    size = None
    name = ENVIRONMENT

    def __init__(self, *, held_out: bool) -> None:
        self._held_out = held_out

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index` of the training or held-out part, whichever this source reads."""
        ninths, rest = divmod(index, _HELD_OUT_BUCKETS - 1)
        last = _HELD_OUT_BUCKETS - 1
        number = _HELD_OUT_BUCKETS * index + last if self._held_out else _HELD_OUT_BUCKETS * ninths + rest
        return PromptRow(str(number), "", {"task": number})

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the texts of the prompts `start` to `stop - 1`."""
        return [self.row(index).text for index in range(start, stop)]


class TaskSource:
    """PromptSource that generates the prompts of a built-in task, without end."""

    size = None

    def __init__(self, task: str, *, held_out: bool, seed: int = 0, options: Mapping[str, Any] | None = None) -> None:
        """options: the task's options, `min_digits` and `max_digits`. Raises ValueError with a one-sentence message for
        an unknown task, or for an option that is unknown or does not fit."""
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data: no built-in task {task!r}, expected one of {', '.join(TASKS)}{hint}")
        self.name = f"task:{task}"
        self._make = TASKS[task]
        self._held_out = held_out
        self._seed = seed
        self._options = _checked_options(task, dict(options or {}))
        self.row(0)  # fails now if the options leave this part without prompts

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index` of the training or held-out part, whichever this source reads."""
        part = "held_out" if self._held_out else "train"
        rng = random.Random(f"{self._seed}/{part}/{index}")
        for _ in range(_TRIES):
            row = self._make(rng, **self._options)
            if is_held_out(row.text) == self._held_out:
                return row
        raise ValueError(f"data.options: {self._options} leave {self.name} no {part} prompts, expected a wider range")

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the texts of the prompts `start` to `stop - 1`."""
        return [self.row(index).text for index in range(start, stop)]


def _checked_options(task: str, options: dict[str, Any]) -> dict[str, int]:
    defaults: dict[str, int] = TASKS[task].__kwdefaults__ or {}
    for name, value in options.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data.options: task {task!r} has no {name!r}, expected {', '.join(defaults)}{hint}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"data.options.{name}: got {value!r}, expected a whole number of at least 1")
    merged = {**defaults, **options}
    if merged["min_digits"] > merged["max_digits"]:
        raise ValueError(f"data.options: min_digits={merged['min_digits']} is above max_digits={merged['max_digits']}")
    return merged
