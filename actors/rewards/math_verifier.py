"""Runs as a process of its own that judges mathematical answers with the package math-verify, one request at a time.

math-verify limits its own time with the signal SIGALRM, which works in the main thread of a process only, and reward
functions run in other threads. The process reads one JSON object per line and answers each with one line:

    {"op": "verify", "gold": "1/2", "text": "so \\boxed{0.5}"}   -> {"value": true}
    {"op": "answer", "text": "so \\boxed{0.5}"}                  -> {"value": "0.5"}

It is started by path, imports nothing of headrace, and ends when its input does.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

_SPARE_CPU_S = 5.0
"""Seconds of CPU time that a request may take beyond twice its time limit before the kernel ends the process. This
holds even when the parent is gone and a computation in C never returns to the interpreter."""


def _parsed(library: Any, text: str, timeout_s: int) -> list[Any]:
    try:
        return library.parse(text, parsing_timeout=timeout_s)
    except library.errors.TimeoutException:  # a BaseException
        return []


def _verify(library: Any, gold: str, text: str, timeout_s: int) -> bool:
    """Return whether the answer in `text` equals `gold`. A gold answer that math-verify cannot read, such as a word, is
    compared as text."""
    expected = _parsed(library, gold if "$" in gold or "\\boxed" in gold else f"${gold}$", timeout_s)
    given = _parsed(library, text, timeout_s)
    if not expected:
        return any(isinstance(part, str) and "".join(part.split()) == "".join(gold.split()) for part in given)
    try:
        return bool(library.verify(expected, given, timeout_seconds=timeout_s))
    except library.errors.TimeoutException:
        return False


def _answer(library: Any, text: str, timeout_s: int) -> str | None:
    """Return a text that is the same for answers of equal value: numbers as decimals, all else as math-verify writes
    it. None if `text` has no answer."""
    found = _parsed(library, text, timeout_s)
    if not found:
        return None
    try:
        return f"{float(found[0]):.10g}"
    except (TypeError, ValueError, OverflowError):
        return str(found[0])


def main(timeout_s: int) -> None:
    """Answer requests until the input ends. timeout_s: limit in seconds of each of a request's three steps."""
    import math_verify  # pyright: ignore[reportMissingImports] - the extra `math`
    import math_verify.errors  # pyright: ignore[reportMissingImports]

    answers, sys.stdout = sys.stdout, sys.stderr  # so that nothing that a library prints gets among the answers
    print(json.dumps({"value": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s + _SPARE_CPU_S)  # its signal's default is to end the process
        try:
            if request["op"] == "verify":
                answer = {"value": _verify(math_verify, request["gold"], request["text"], timeout_s)}
            else:
                answer = {"value": _answer(math_verify, request["text"], timeout_s)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
