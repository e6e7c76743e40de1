"""Judges mathematical answers with the package math-verify, in the main thread of a process that does nothing else.

math-verify limits its own time with the signal SIGALRM, which works in the main thread of a process only. A process
that imports this module imports neither torch nor Ray.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from .answers import expected_answer, last_boxed

if TYPE_CHECKING:
    from ..protocols import Prompt

_SPARE_CPU_S = 5.0
"""Seconds of CPU time that a call may take beyond three times its time limit before the kernel ends the process. This
holds even when the parent is gone and a computation in C never returns to the interpreter."""


class MathVerifier:
    r"""Reward of 1.0 when the response's answer equals the expected one by value, else 0.0. 0.5 equals \frac{1}{2}. Its
    methods must be called in the main thread."""

    def __init__(self, extract: Literal["boxed", "any"], timeout_s: float) -> None:
        """Import math-verify. extract, timeout_s: see `MathVerify`."""
        import math_verify  # pyright: ignore[reportMissingImports] - the extra `math`
        import math_verify.errors  # pyright: ignore[reportMissingImports]

        self._library: Any = math_verify
        self._extract = extract
        self._timeout_s = math.ceil(timeout_s)

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """Return the reward. An expected answer that math-verify cannot read, such as a word, is compared as text.
        Raises ValueError when the prompt has no answer."""
        gold, text = expected_answer(prompt), self._answer_text(response)
        if text is None:
            return 0.0
        with _bounded_cpu(self._timeout_s):
            expected = self._parsed(gold if "$" in gold or "\\boxed" in gold else f"${gold}$")
            given = self._parsed(text)
            if not expected:
                plain = "".join(gold.split())
                return float(any(isinstance(part, str) and "".join(part.split()) == plain for part in given))
            try:
                return float(self._library.verify(expected, given, timeout_seconds=self._timeout_s))
            except self._library.errors.TimeoutException:  # a BaseException
                return 0.0

    def answer_of(self, response: str) -> str | None:
        """Return the answer that a response votes for in a majority vote. A number becomes a decimal, so that equal
        numbers give equal texts; all else is as math-verify writes it. None if there is no answer."""
        text = self._answer_text(response)
        if text is None:
            return None
        with _bounded_cpu(self._timeout_s):
            found = self._parsed(text)
            if not found:
                return None
            try:
                return f"{float(found[0]):.10g}"
            except (TypeError, ValueError, OverflowError):
                return str(found[0])

    def _answer_text(self, response: str) -> str | None:
        if self._extract == "any":
            return response
        found = last_boxed(response)
        return None if found is None else f"\\boxed{{{found}}}"

    def _parsed(self, text: str) -> list[Any]:
        try:
            return self._library.parse(text, parsing_timeout=self._timeout_s)
        except self._library.errors.TimeoutException:
            return []


@contextmanager
def _bounded_cpu(timeout_s: int) -> Iterator[None]:
    """End this process when the block takes too much CPU time. timeout_s: limit in seconds of each of its steps."""
    signal.setitimer(signal.ITIMER_PROF, 3 * timeout_s + _SPARE_CPU_S)  # its signal's default is to end the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
