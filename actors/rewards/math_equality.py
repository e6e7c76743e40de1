"""The reward `math_verify` compares mathematical answers by value, in a process that is killed at its deadline."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Literal

from ...codecs.imports import MissingExtra
from ..protocols import Prompt
from .answers import expected_answer, last_boxed

_PROGRAM = Path(__file__).with_name("math_verifier.py")
_START_TIMEOUT_S = 120.0
"""Seconds within which the process must have imported math-verify, which takes long on a busy machine."""
_SPARE_S = 1.0
"""Seconds that a request gets beyond its time limit, in which the process may give it up by itself."""
_ERROR_CHARS = 500


class MathVerify:
    r"""Reward of 1.0 when the answer in the response equals the expected answer by value, such as 0.5 and \frac{1}{2},
    else 0.0. The comparison is that of the package math-verify."""

    def __init__(self, extract: Literal["boxed", "any"] = "boxed", timeout_s: float = 5.0) -> None:
        r"""extract: `boxed` looks at the content of the last `\boxed{...}` only; `any` also accepts other formulas and
        numbers, the last one if there are several, as math-verify finds them. timeout_s: time limit in seconds of a
        comparison. Raises ValueError for other values."""
        if extract not in ("boxed", "any"):
            raise ValueError(f"reward math_verify: extract {extract!r}, expected 'boxed' or 'any'")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ValueError(f"reward math_verify: timeout_s {timeout_s!r}, expected seconds above 0")
        self._extract = extract
        self._process = _Verifier(float(timeout_s))

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """Return the reward. Raises ValueError when the prompt has no answer, TimeoutError when the comparison exceeds
        its time limit, and RuntimeError when math-verify fails."""
        gold = expected_answer(prompt)
        text = self._answer_text(response)
        return 0.0 if text is None else float(self._process.ask(op="verify", gold=gold, text=text))

    def answer_of(self, response: str) -> str | None:
        """Return the answer that a response votes for in a majority vote; equal numbers give equal texts. None if there
        is no answer. Raises as a call does."""
        text = self._answer_text(response)
        return None if text is None else self._process.ask(op="answer", text=text)

    def _answer_text(self, response: str) -> str | None:
        if self._extract == "any":
            return response
        found = last_boxed(response)
        return None if found is None else f"\\boxed{{{found}}}"


class _Verifier:
    """Handle of the process that runs math_verifier.py. It is started by the first request, and again after it was
    killed. Requests of several threads take turns."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end = lambda: None

    def ask(self, **request: Any) -> Any:
        """Send a request and return its answer. Raises TimeoutError at the deadline, after killing the process,
        RuntimeError if the process fails, and MissingExtra if math-verify is not installed."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError as error:
                self._end()
                raise RuntimeError("math-verify's process has ended") from error
            answer = self._read(self._timeout_s + _SPARE_S)
        if "error" in answer:
            raise RuntimeError(f"math-verify raised {answer['error']}")
        return answer["value"]

    def _start(self) -> None:
        self._end()
        # -P: the folder of the program must not become part of the import path, where its names would hide others.
        command = [sys.executable, "-P", str(_PROGRAM), str(math.ceil(self._timeout_s))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            self._read(_START_TIMEOUT_S)
        except RuntimeError as error:
            if "ModuleNotFoundError" in str(error):
                raise MissingExtra("math_verify", "the reward math_verify", "math") from error
            raise

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer of the process. At the deadline the process is killed."""
        process, deadline, line = self._process, time.monotonic() + timeout_s, b""
        assert process is not None and process.stdout is not None and process.stderr is not None
        outputs = [process.stdout, process.stderr]
        said = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select(outputs, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._end()
                raise TimeoutError(f"math-verify gave no answer within {timeout_s:g} s: its process was killed")
            for pipe in ready:
                part = os.read(pipe.fileno(), 1 << 16)
                if pipe is process.stderr:
                    said = (said + part)[-_ERROR_CHARS:]
                    outputs = outputs if part else [process.stdout]
                elif part:
                    line += part
                else:
                    process.kill()
                    said = (said + process.stderr.read())[-_ERROR_CHARS:]
                    self._end()
                    raise RuntimeError(
                        f"math-verify's process ended: {' '.join(said.decode(errors='replace').split())}"
                    )
        return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it still runs, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
