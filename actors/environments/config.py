"""The section `environment` of the configuration: the environment that the policy acts in, and its bounds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ...dataplane.config import Count, Positive, Section

ENVIRONMENT_KINDS = ("single_turn", "tool_use", "verifiers")


class EnvironmentConfig(Section):
    """The environment that the policy acts in: what it is, and how long and how often it can run."""

    kind: str | None = None
    """Kind of the environment: `single_turn`, `tool_use`, `verifiers`, or your own as
    `package.module:factory`. Your own is a
    coroutine function that plays an episode, or a function or class that returns an object with a coroutine `play`.
    Unset: `rollout.environment`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment. `tool_use` takes `tools` and `max_turns`. `verifiers` takes `env`, the
    configuration of one of its environments, `python`, the path of a Python that has verifiers, and `path`, folders to
    import from."""
    max_rows: Count = 1
    """Largest number of rows of an episode. It is above 1 for conversations whose earlier tokens change from turn to
    turn, as when an agent rewrites its history. The advantage of an episode counts once, and is that of all its
    rows. An episode with more rows fails."""
    turn_timeout_s: Positive = 120.0
    """Seconds that the environment can take between two turns of the policy. The time in which the policy generates
    does not count."""
    episode_timeout_s: Positive = 600.0
    """Seconds that the environment can take in an episode, without the time in which the policy generates."""
    on_timeout: Literal["fail", "partial"] = "fail"
    """Treatment of episodes that take too long. `fail`: they are not trained on, and are counted. `partial`: they end
    where they are, with the rewards that they have been given."""
    max_episodes: Count = 1024
    """Largest number of episodes that run at the same time in a rollout actor. When some of its engines have failed,
    it is smaller in proportion."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str | None) -> str | None:
        if kind is not None:
            module, colon, factory = kind.partition(":")
            if kind not in ENVIRONMENT_KINDS and not (colon and module and factory.isidentifier()):
                raise ValueError(f"got {kind!r}, expected {', '.join(ENVIRONMENT_KINDS)} or package.module:factory")
        return kind
