"""Names the kinds of failures of episodes, and the exceptions with which an environment says which kind it met.

RuntimeError
├── EpisodeFailed       an episode failed (kind `environment`)
│   ├── SandboxFailed   what the environment runs failed: a child process, a server, a container (`sandbox`)
│   ├── JudgeFailed     a judge that the environment asked failed (`judge`)
│   └── LimitExceeded   time, rows or context did not suffice (`limit`)
└── FailureStopsRun     a failure of a kind for which `environment.on_failure` says `stop`
"""

from __future__ import annotations

from typing import Literal

FailureKind = Literal["environment", "sandbox", "judge", "engine", "limit"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("environment", "sandbox", "judge", "engine", "limit")
"""Kinds of failures. `environment`: its code raised an error. `sandbox`: what it runs failed. `judge`: a reward
function failed or took too long. `engine`: generation was aborted, or the engine refused a request. `limit`: time, rows
or context did not suffice."""


class EpisodeFailed(RuntimeError):
    """An episode failed. An environment may raise one of the subclasses to name the kind of the failure."""

    kind: FailureKind = "environment"


class SandboxFailed(EpisodeFailed):
    """The sandbox of an episode failed: a child process died, a server could not be reached, a container ended."""

    kind: FailureKind = "sandbox"


class JudgeFailed(EpisodeFailed):
    """A judge that the environment asked failed or did not answer in time."""

    kind: FailureKind = "judge"


class LimitExceeded(EpisodeFailed):
    """The time, the rows or the context of an episode did not suffice."""

    kind: FailureKind = "limit"


class FailureStopsRun(RuntimeError):
    """An episode failed, and `environment.on_failure` says that such a failure ends the run. The message names both."""

    def __init__(self, kind: str, error: str) -> None:
        super().__init__(f"environment.on_failure.{kind}=stop: {error}")
        self.given = (kind, error)

    def __reduce__(self) -> tuple[type[FailureStopsRun], tuple[str, str]]:
        return FailureStopsRun, self.given


def kind_of_error(error: BaseException) -> FailureKind:
    """Return the kind of failure that an error of an environment stands for.

    A ConnectionError stands for `sandbox`, because it says that a process or a server is gone. A group of errors has
    the first kind among its errors other than `environment`. Any other error stands for `environment`.
    """
    if isinstance(error, BaseExceptionGroup):
        kinds: list[FailureKind] = [kind_of_error(one) for one in error.exceptions]
        named: list[FailureKind] = [kind for kind in kinds if kind != "environment"]
        return named[0] if named else "environment"
    if isinstance(error, EpisodeFailed):
        return error.kind
    return "sandbox" if isinstance(error, ConnectionError) else "environment"
