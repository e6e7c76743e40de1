"""The reward `math_verify` compares mathematical answers by value, in processes that are killed at their deadline."""

from __future__ import annotations

import importlib.util
import math
from typing import Literal

from ...dataplane.imports import MissingExtra
from ..process.user_processes import UserProcesses
from .math_verifier import MathVerifier

_PACKAGE = "math_verify"
_SPARE_S = 1.0
"""Seconds that a comparison gets beyond its time limit, in which the process may give it up by itself."""


class MathVerify:
    r"""Reward of 1.0 when the response's answer equals the expected one by value, else 0.0. 0.5 equals \frac{1}{2}. The
    comparison is that of the package math-verify."""

    def __init__(self, extract: Literal["boxed", "any"] = "boxed", timeout_s: float = 5.0) -> None:
        r"""Choose where the answer is looked for. extract: `boxed` looks at the content of the last `\boxed{...}` only;
        `any` also accepts other formulas and numbers, the last one if there are several, as math-verify finds them.
        timeout_s: time limit in seconds of a comparison. Raises ValueError for other values."""
        if extract not in ("boxed", "any"):
            raise ValueError(f"reward math_verify: extract {extract!r}, expected 'boxed' or 'any'")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ValueError(f"reward math_verify: timeout_s {timeout_s!r}, expected seconds above 0")
        self._options = {"extract": extract, "timeout_s": timeout_s}
        self.deadline_s = timeout_s + _SPARE_S
        """Seconds after which the process of a comparison is killed."""

    def in_processes(self, num_processes: int) -> UserProcesses:
        """Return the processes that compute the reward, and with `answer_of` the answer that a response votes for.
        Raises MissingExtra if math-verify is not installed."""
        if importlib.util.find_spec(_PACKAGE) is None:
            raise MissingExtra(_PACKAGE, "the reward math_verify", "math")
        target = f"{MathVerifier.__module__}:{MathVerifier.__name__}"
        return UserProcesses(target, self._options, num_processes)
