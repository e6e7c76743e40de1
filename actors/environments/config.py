"""Config sections `environment` and `rollout.endpoint`: the environment, its limits, and the endpoint for agents."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from ...dataplane.config import Count, CountOrZero, Positive, Section
from ..failures import FailureKind

ENVIRONMENT_KINDS = ("single_turn", "tool_use", "verifiers", "textarena", "openenv")


class EndpointConfig(Section):
    """Endpoint of each rollout actor, through which agents speak to the policy in OpenAI's or Anthropic's format."""

    enabled: bool = False
    """Whether there is an endpoint. An environment then finds its address and the secret of its episode in
    `episode.endpoint`. Needs the extra `endpoint`."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the endpoint listens, on a free port. `0.0.0.0` stands for the address of
    `resources.interface`, if that is set. A client that reaches the endpoint and knows an episode's secret can speak to
    the policy in that episode."""
    rows: Literal["conversation", "call"] = "conversation"
    """Way in which an episode's calls become rows. `conversation`: a call that continues an earlier call extends the
    same row. `call`: each call is a separate row. `environment.max_rows` limits their number."""
    model: str = Field(default="policy", min_length=1)
    """Name of the policy in the list of models. Requests can name any model, unless the policy is an adapter: then
    they name the policy, or `base` for the model without it, whose answers are not trained on."""
    sampling: Literal["run", "request"] = "run"
    """Source of the settings with which a call's answer is sampled. `run`: the run alone; what requests say is ignored.
    `request`: a request's `top_p`, `top_k` and `min_p` replace the run's, and training uses the distribution that they
    leave (`rollout.mask_limit`). What training could not repeat is refused: penalties, `logit_bias`, and another
    temperature than the run's."""
    max_body_mib: Count = 4
    """Largest size of a request's body in MiB; a larger body is refused while it is read."""
    max_calls: Count = 16384
    """Largest number of calls that are answered at the same time. Further calls are refused with the status 429. Each
    call takes a file descriptor while it waits for its answer."""
    max_episode_calls: Count = 16
    """Largest number of calls that one episode can have open at the same time."""
    body_timeout_s: Positive = 30.0
    """Seconds within which a request's body must arrive."""

    @property
    def own_sampling(self) -> bool:
        """True if requests say from which tokens their answers are drawn."""
        return self.enabled and self.sampling == "request"


Treatment = Literal["mask", "retry", "zero", "stop"]


class OnFailure(Section):
    """Treatment of an episode that failed, by the kind of failure.

    `mask`: its rows are not trained on. `retry`: it is played again, at most `environment.retries` times, and then
    masked. `zero`: it is trained on with the reward 0. `stop`: the run ends with an error.
    """

    environment: Treatment = "mask"
    """Treatment of an episode in which the environment's own code raised an error."""
    sandbox: Treatment = "retry"
    """Treatment of an episode in which something that the environment runs failed: a process, a server, a container.
    The environment says so by raising `headrace.SandboxFailed` or a ConnectionError."""
    judge: Treatment = "mask"
    """Treatment of an episode whose reward functions failed or took too long. With `retry`, the samples of the prompt
    are scored again; the episode itself is played again only if its environment raised `headrace.JudgeFailed`."""
    engine: Treatment = "retry"
    """Treatment of an episode in which the engine refused a request or aborted it. An engine that has died is replaced,
    and no episode fails by that."""
    limit: Literal["mask", "retry", "zero", "stop", "partial"] = "mask"
    """Treatment of an episode that exceeded a limit of time, rows or context. `partial`: it ends at once and keeps its
    rows and rewards so far."""

    @property
    def treatments(self) -> dict[FailureKind, str]:
        """Kind of failure -> treatment."""
        return {
            "environment": self.environment,
            "sandbox": self.sandbox,
            "judge": self.judge,
            "engine": self.engine,
            "limit": self.limit,
        }


class EnvironmentConfig(Section):
    """The environment that the policy acts in, and the limits of its episodes."""

    kind: str = "single_turn"
    """Kind of the environment: `single_turn`, `tool_use`, `verifiers`, `textarena`, `openenv`, or the import path
    of your own, `package.module:factory`. In `single_turn` an episode is one prompt and one answer. In
    `tool_use` the policy can call tools by writing `<tool>name: arguments</tool>` and continues with their results,
    whose tokens are not trained on. The others play environments of the libraries of these names. An import path names
    a coroutine function that plays an episode, or a function or class that returns an object with a coroutine
    `play`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment. `tool_use` takes `tools` (`calculator`, or your functions from text to text
    as `package.module:function`), `max_turns` (4 if unset), `runs`, `timeout_s` and `retries`. `verifiers` takes `env`,
    the configuration of one of its environments, `python`, the path of a Python that has verifiers, and `path`, folders
    to import from. The pages of `textarena` and `openenv` have their options."""
    max_rows: Count = 1
    """Largest number of rows of an episode. Set it above 1 if earlier tokens of a conversation change from turn to
    turn, for example because an agent rewrites its history. An episode counts once in the advantages, and all its rows
    get its advantage. An episode with more rows fails."""
    turn_timeout_s: Positive = 120.0
    """Seconds that the environment can take between two turns of the policy. The time in which the policy generates
    does not count."""
    episode_timeout_s: Positive = 600.0
    """Seconds that the environment can take in an episode, without the time in which the policy generates."""
    on_failure: OnFailure = OnFailure()
    """Treatment of an episode that failed, by the kind of failure: a section with the keys below."""
    retries: CountOrZero = 2
    """Largest number of times that an episode is played again, where `environment.on_failure` says `retry`."""
    recover: Literal["turn", "prefix", "restart"] = "turn"
    """Point from which an episode continues after the death of its rollout actor or of the run, if a journal is kept
    (`run.journal`). `turn`: from its last turn; it is played again, and the recorded turns answer. `prefix`: also from
    within a turn, which is generated and recorded in pieces of `environment.recover_tokens`. `restart`: from its
    beginning. An environment that cannot be played again has an attribute `recover = "restart"`."""
    recover_tokens: Count = 512
    """Largest number of tokens that an engine is asked for at once with `environment.recover=prefix`."""
    max_episodes: Count = 16384
    """Largest number of episodes that run at the same time in a rollout actor. If some of the actor's engines have
    failed, the number is reduced in proportion. An episode that waits takes some ten kilobytes and no time, so the
    limit serves environments whose episodes take more, such as a process or a sandbox each."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        module, colon, factory = kind.partition(":")
        if kind not in ENVIRONMENT_KINDS and not (colon and module and factory.isidentifier()):
            raise ValueError(f"got {kind!r}, expected {', '.join(ENVIRONMENT_KINDS)} or package.module:factory")
        return kind
