"""The section `simulation`: the speeds and sizes that a simulated run is made of."""

from __future__ import annotations

from typing import Literal

from ...dataplane.section import Count, CountOrZero, NonNegative, Positive, Section, Share
from ..config.config import Config
from ..config.load import validated


class SimulationConfig(Section):
    """Speeds and sizes of a simulated run. An unset key is measured from the run that `--from` names, else as said."""

    steps: Count | None = None
    """Number of steps to simulate. Unset: `algorithm.steps`, 100 at most."""
    async_staleness: Count = 1
    """Number of versions by which rollouts of `async` may be ahead of the trainer."""
    streaming_staleness: CountOrZero = 0
    """Number of versions by which rollouts of `streaming` may be ahead of the trainer; 0 is strictly on-policy."""
    sampler: Literal["in_order", "windowed", "ready_first", "oldest_version_first"] | None = None
    """Order in which the trainer takes groups. Unset: `algorithm.sampler` if that is one of these, else
    `ready_first` for `streaming`, `in_order` for the others. Groups that others have overtaken may become too old:
    those are dropped."""
    window: Count | None = None
    """Number of prompts of the sampler `windowed`. Unset: `algorithm.prompts_per_step`."""

    response_tokens: Positive | None = None
    """Mean number of tokens of a response. Unset: a quarter of `rollout.max_new_tokens`."""
    response_sigma: NonNegative | None = None
    """Sigma of the log-normal that lengths are drawn from; 0: all alike. Unset: 0.5."""
    prompt_share: Share = 0.0
    """Share of that variance that belongs to the prompt; 1: all rows of a group are equally long."""
    prompt_tokens: NonNegative = 128.0
    """Mean number of tokens of a prompt, which the trainer computes too."""

    num_engines: Count | None = None
    """Number of engines. Unset: `rollout.num_engines`."""
    engine_rows: Count | None = None
    """Number of rows that an engine generates at a time. Unset: `rollout.max_batch`."""
    decode_s: Positive | None = None
    """Seconds that a token takes in an engine with one row. Unset: 0.02."""
    decode_row_s: NonNegative = 0.0
    """Seconds that each row in the engine adds to that."""
    latency_s: NonNegative | None = None
    """Median seconds of a group's generation where they do not depend on lengths and on what else the engine does, as
    with tools or a remote service; the keys on decoding then have no effect. Unset: `scripted.latency_s` with
    `rollout.engine=scripted`, else 0: engines decode token by token."""
    latency_sigma: NonNegative | None = None
    """Sigma of the log-normal that these latencies are drawn from. Unset: `scripted.latency_sigma`."""
    request_s: NonNegative | None = None
    """Seconds that a group spends outside decoding: prefill, environment, reward. Unset: 0."""

    train_token_s: NonNegative | None = None
    """Seconds that the whole trainer takes for forward and backward of a token (of prompt or response). Unset: 1e-5."""
    logprob_token_s: NonNegative | None = None
    """Seconds that the whole trainer takes for all log-prob passes over a token. Unset: a third of `train_token_s` if
    there is such a pass, else 0."""
    train_row_s: NonNegative | None = None
    """Seconds that a row takes besides its tokens. Unset: as `scripted` says with `trainer.backend=scripted`, else
    0."""
    chunk_s: NonNegative | None = None
    """Seconds that a chunk of groups takes besides its rows. A step of `sync` and `async` has one chunk. Unset: 0."""
    plan_s: NonNegative | None = None
    """Seconds in which the controller plans a chunk and the trainer waits. Unset: 0."""
    chunk_groups: Count | None = None
    """Number of groups that `streaming` trains on together. Unset: as `algorithm.chunk_groups`."""
    train_step_s: NonNegative | None = None
    """Seconds that a step takes besides its rows: optimizer, checkpoints, metrics. Unset: as `train_row_s`."""

    controller_s: NonNegative | None = None
    """Seconds of a step in which the controller works and the trainer does not: plan, metrics, clear. Unset: 0."""
    sync_s: NonNegative | None = None
    """Seconds of a weight sync, in which the trainer waits. Unset: 1."""
    pause_s: NonNegative | None = None
    """Seconds at the end of a weight sync in which engines stand still. Unset: all of it."""

    call_s: NonNegative | None = None
    """Seconds that a call of the data plane takes. Unset: 0.001."""
    gib_per_s: Positive = 1.0
    """Bandwidth of the data plane in GiB/s: of each put, and of the trainer's reads together."""
    put_bytes: NonNegative = 21.0
    """Number of bytes that a rollout puts for each token."""
    got_bytes: NonNegative = 40.0
    """Number of bytes that the trainer reads for each token, in all passes."""

    gpus: Count = 1
    """Number of GPUs that all these numbers are of; `--gpus` scales them to other numbers."""
    scaling_efficiency: Share = 1.0
    """Share of a GPU's training speed that is left each time their number doubles."""
    batch_grows: bool = False
    """Whether `algorithm.prompts_per_step` grows with the number of GPUs."""


class _SimulationFile(Section):
    """What `headrace simulate` reads of a configuration beside the run's own sections."""

    simulation: SimulationConfig


def simulation_section(config: Config) -> SimulationConfig:
    """The section `simulation` of a run's configuration, checked. Raises ConfigError."""
    return validated(_SimulationFile, {"simulation": config.simulation}).simulation
