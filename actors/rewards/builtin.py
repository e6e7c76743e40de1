"""Defines the built-in reward functions, from `exact_match` and `boxed` to `math_verify` and `reasoning_gym`.

`math_verify` compares mathematical answers by value, in separate processes that do nothing else and are killed at their
deadline. The package math-verify limits its own time with the signal SIGALRM, which works in the main thread of a
process only. These processes import this module, which therefore imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ...dataplane.imports import MissingExtra
from ..process.user_function_timeouts import UserProcesses

if TYPE_CHECKING:  # The processes of math_verify import this module without torch.
    from ..protocols import Prompt, Sample


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPARE_CPU_S = 5.0
"""Seconds of CPU time that a call can take beyond three times its time limit. After that the kernel ends the process,
even if its parent is gone and a computation in C never returns to the interpreter."""
_PACKAGE = "math_verify"
_SPARE_S = 1.0
"""Seconds beyond its time limit that a comparison has to stop by itself; after that its process is killed."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` (or `\fbox{...}`) in `text`. Braces in it are balanced,
    and white space around it is removed. Returns None if there is none."""
    for box in reversed(list(_BOX.finditer(text))):
        depth, index = 1, box.end()
        while index < len(text):
            character = text[index]
            if character == "\\":
                index += 2  # An escaped brace, such as that of a set, neither opens nor closes a group.
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


def exact_match(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return 1.0 when `response` equals `prompt.answer`, both stripped of surrounding white space, else 0.0.

    Raises ValueError when the prompt has no answer to compare with.
    """
    return float(response.strip() == expected_answer(prompt).strip())


def per_position(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return the share, 0.0 to 1.0, of character positions at which response and answer agree. Both are stripped of
    surrounding white space.

    The number of agreeing positions is divided by the length of the longer text, so missing and extra characters count
    as wrong. Two empty texts give 1.0.
    """
    given, expected = response.strip(), prompt.answer.strip()
    whole = max(len(given), len(expected))
    return sum(a == b for a, b in zip(given, expected, strict=False)) / whole if whole else 1.0


class Format:
    """Reward of 1.0 when the whole stripped response matches a pattern, else 0.0. The model must have ended the
    response itself (finish_reason `stop`)."""

    def __init__(self, pattern: str) -> None:
        """pattern: a regular expression, in which `.` also matches newlines. Raises ValueError if the expression is
        invalid."""
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"reward format: pattern {pattern!r} is not a regular expression: {error}") from error

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        return float(finish_reason == "stop" and self._pattern.fullmatch(response.strip()) is not None)


class Overlong:
    """Soft punishment of answers close to the length limit (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).

    It is 0 up to `max_length - cache` tokens, falls linearly to -1 at `max_length`, and is -1 beyond.
    """

    def __init__(self, max_length: int, cache: int) -> None:
        """Set the lengths. max_length: largest number of tokens that the policy may generate, including the stop token;
        it corresponds to `rollout.max_new_tokens` (20480 in the paper). cache: number of tokens below `max_length` over
        which the reward falls (4096 in the paper). Raises ValueError unless 1 <= cache <= max_length."""
        for name, value in (("max_length", max_length), ("cache", cache)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"reward overlong: got {name}={value!r}, expected a whole number of tokens, 1 or more")
        if cache > max_length:
            raise ValueError(f"reward overlong: got cache={cache}, expected at most max_length={max_length}")
        self._free = max_length - cache
        self._cache = cache

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, *, response_tokens: int) -> float:
        return max(-1.0, min(0.0, (self._free - response_tokens) / self._cache))


class ReasoningGymReward:
    """The score that reasoning-gym gives the response, for prompts of `reasoning-gym:NAME`."""

    def __init__(self) -> None:
        """Import reasoning-gym. Raises MissingExtra if it is not installed."""
        try:
            self._gym = importlib.import_module("reasoning_gym")
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "reasoning_gym", "reward reasoning_gym", "reasoning-gym") from None

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """Return the score, 0.0 to 1.0, of the stripped response. Raises ValueError for a prompt of another source.
        Errors of the library's scorer are passed on."""
        name = prompt.fields.get("source_dataset")
        if not isinstance(name, str):
            raise ValueError(
                f"prompt {prompt.uid!r} does not come from reasoning-gym, expected data.train=reasoning-gym:NAME"
            )
        entry = {"question": prompt.text, "answer": prompt.answer, "metadata": dict(prompt.fields)}
        return float(self._gym.get_score_answer_fn(name)(response.strip(), entry))


class EnvironmentReward:
    """The reward that the environment itself gave the episode."""

    def __init__(self, name: str = "reward") -> None:
        """name: name of one of the environment's rewards; `reward` is what its `play` returned."""
        self._name = name

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, *, episode: Sample) -> float:
        """Return the reward. It is 0.0 if the environment gave no reward to an episode that ran out of tokens or time.

        Raises ValueError if the environment gave no reward to any other episode.
        """
        if self._name in episode.rewards:
            return episode.rewards[self._name]
        if finish_reason in ("length", "timeout"):
            return 0.0
        raise ValueError(
            f"the environment gave no reward {self._name!r}; it gave {', '.join(episode.rewards) or 'none'}"
        )


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
            except self._library.errors.TimeoutException:  # This exception derives from BaseException.
                return 0.0

    def answer_of(self, response: str) -> str | None:
        """Return the answer that a response votes for in a majority vote. A number becomes a decimal, so that equal
        numbers give equal texts; any other answer stays as math-verify writes it. Returns None if there is no
        answer."""
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
    """End this process when the block takes too much CPU time. timeout_s: time limit in seconds of each step of the
    block."""
    # By default the timer's signal ends the process.
    signal.setitimer(signal.ITIMER_PROF, 3 * timeout_s + _SPARE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class MathVerify:
    r"""Reward of 1.0 when the response's answer equals the expected one by value, else 0.0. 0.5 equals \frac{1}{2}. The
    package math-verify compares the answers."""

    def __init__(self, extract: Literal["boxed", "any"] = "boxed", timeout_s: float = 5.0) -> None:
        r"""Choose where the answer is looked for. extract: `boxed` looks at the content of the last `\boxed{...}` only;
        `any` also accepts other formulas and numbers, the last one if there are several, as math-verify finds them.
        timeout_s: time limit in seconds of a comparison. Raises ValueError for other values."""
        if extract not in ("boxed", "any"):
            raise ValueError(f"reward math_verify: got extract={extract!r}, expected 'boxed' or 'any'")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ValueError(f"reward math_verify: got timeout_s={timeout_s!r}, expected seconds above 0")
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
