"""The section `simulation`: the speeds and sizes that a simulated run is made of."""

from __future__ import annotations

from typing import Literal

from ...dataplane.section import Count, CountOrZero, NonNegative, Positive, Section, Share
from ..config.config import Config
from ..config.load import validated


class SimulationConfig(Section):
    """`headrace simulate`. None: measured from the run that `--from` names, else as said."""

    steps: Count | None = None
    """Steps to simulate. None: `algorithm.steps`, 100 at most."""
    async_staleness: Count = 1
    """`async`: versions by which rollouts may be ahead of the trainer."""
    streaming_staleness: CountOrZero = 0
    """`streaming`: the same; 0 is strictly on-policy."""
    sampler: Literal["in_order", "windowed", "ready_first", "oldest_version_first"] | None = None
    """Which groups the trainer takes first. None: `algorithm.sampler` if that is one of these, else `ready_first` for
    `streaming`, `in_order` for the others. Groups that others have overtaken may become too old: they are dropped."""
    window: Count | None = None
    """`windowed`: prompts. None: `algorithm.prompts_per_step`."""

    response_tokens: Positive | None = None
    """Mean tokens of a response. None: a quarter of `rollout.max_new_tokens`."""
    response_sigma: NonNegative | None = None
    """Sigma of the log-normal that lengths are drawn from; 0: all alike. None: 0.5."""
    prompt_share: Share = 0.0
    """Share of that variance that belongs to the prompt: 1: all rows of a group are equally long."""
    prompt_tokens: NonNegative = 128.0
    """Mean tokens of a prompt, which the trainer computes too."""

    num_engines: Count | None = None
    """None: `rollout.num_engines`."""
    engine_rows: Count | None = None
    """Rows that an engine generates at a time. None: `rollout.max_batch`."""
    decode_s: Positive | None = None
    """Seconds a token, in an engine with one row. None: 0.02."""
    decode_row_s: NonNegative = 0.0
    """What each row in the engine adds to that."""
    latency_s: NonNegative | None = None
    """Median seconds of a group's generation where they do not depend on lengths and on what else the engine does, as
    with tools or a remote service; the keys on decoding then have no effect. None: `scripted.latency_s` with
    `rollout.engine=scripted`, else 0: engines decode token by token."""
    latency_sigma: NonNegative | None = None
    """Sigma of the log-normal that those are drawn from. None: `scripted.latency_sigma`."""
    request_s: NonNegative | None = None
    """Seconds of a group outside decoding: prefill, environment, reward. None: 0."""

    train_token_s: NonNegative | None = None
    """Seconds a token (of prompt and response) of forward and backward, by the whole trainer. None: 1e-5."""
    logprob_token_s: NonNegative | None = None
    """The same of all log-prob passes together. None: a third of `train_token_s` if there is such a pass, else 0."""
    train_row_s: NonNegative | None = None
    """Seconds a row, besides its tokens. None: as `scripted` says with `trainer.backend=scripted`, else 0."""
    chunk_s: NonNegative | None = None
    """Seconds a chunk of groups, besides its rows. A step of `sync` and `async` has one chunk. None: 0."""
    plan_s: NonNegative | None = None
    """Seconds a chunk in which the controller plans it and the trainer waits. None: 0."""
    chunk_groups: Count | None = None
    """`streaming`: groups that are trained on together. None: as `algorithm.chunk_groups`."""
    train_step_s: NonNegative | None = None
    """Seconds a step, besides its rows: optimizer, checkpoints, metrics. None: as `train_row_s`."""

    controller_s: NonNegative | None = None
    """Seconds a step in which the controller is at work and the trainer is not: plan, metrics, clear. None: 0."""
    sync_s: NonNegative | None = None
    """Seconds of a weight sync, in which the trainer waits. None: 1."""
    pause_s: NonNegative | None = None
    """How long of it, at its end, engines stand still. None: all of it."""

    call_s: NonNegative | None = None
    """Seconds a call of the data plane. None: 0.001."""
    gib_per_s: Positive = 1.0
    """Bandwidth of the data plane: of each put, and of the trainer's reads together."""
    put_bytes: NonNegative = 21.0
    """Bytes a token that a rollout puts."""
    got_bytes: NonNegative = 40.0
    """Bytes a token that the trainer reads (all passes)."""

    gpus: Count = 1
    """GPUs that all these figures are of; `--gpus` scales them to other numbers."""
    scaling_efficiency: Share = 1.0
    """What is left of a GPU's training speed each time their number doubles."""
    batch_grows: bool = False
    """Whether `algorithm.prompts_per_step` grows with the number of GPUs."""


class _SimulationFile(Section):
    """What `headrace simulate` reads of a configuration beside the run's own sections."""

    simulation: SimulationConfig


def simulation_section(config: Config) -> SimulationConfig:
    """The section `simulation` of a run's configuration, checked. Raises ConfigError."""
    return validated(_SimulationFile, {"simulation": config.simulation}).simulation
