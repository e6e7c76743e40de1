"""Declares the section `simulation` of the configuration: the speeds and sizes of a simulated run."""

from __future__ import annotations

from typing import Literal

from ...dataplane.config import Count, CountOrZero, NonNegative, Positive, Section, Share
from ..config.config import Config
from ..config.load import validated


class SimulationConfig(Section):
    """Speeds and sizes of a simulated run. `headrace simulate --from RUN_DIR` measures some of the unset keys in that
    run; the other unset keys have the defaults below."""

    steps: Count | None = None
    """Number of steps to simulate. Unset: `algorithm.steps`, but at most 100."""
    async_staleness: Count = 1
    """Largest allowed staleness in the modes `async` and `async_streaming`: the number of weight versions between the
    start of a rollout and the step that trains on it."""
    streaming_staleness: CountOrZero = 0
    """Largest allowed staleness in the mode `streaming`: the number of weight versions between the start of a rollout
    and the step that trains on it. 0 is strictly on-policy."""
    sampler: Literal["in_order", "windowed", "ready_first", "oldest_version_first"] | None = None
    """Order in which the trainer takes groups. A group can become too old if later groups are taken first; it is then
    dropped. Unset: `algorithm.sampler` if this key supports its value, else `ready_first` for `streaming` and
    `in_order` for the other modes."""
    window: Count | None = None
    """Number of consecutive prompts of the prompt stream from which the sampler `windowed` can choose, beginning with
    the first prompt that was neither taken nor dropped. Unset: the window in `algorithm.sampler_options`, else
    `algorithm.prompts_per_step`."""

    response_tokens: Positive | None = None
    """Mean number of tokens of a response. Unset: a quarter of `rollout.max_new_tokens`."""
    response_sigma: NonNegative | None = None
    """Sigma of the log-normal distribution of response lengths; 0 gives all responses the same length. Unset: 0.5."""
    prompt_share: Share = 0.0
    """Share of the variance of response lengths that comes from differences between prompts; with 1 all rows of a group
    have the same length."""
    prompt_tokens: NonNegative = 128.0
    """Mean number of tokens of a prompt, which the trainer processes in addition to the response."""

    num_engines: Count | None = None
    """Number of engines. Unset: `rollout.num_engines`."""
    engine_rows: Count | None = None
    """Largest number of rows that an engine generates at the same time. Unset: `rollout.max_batch`."""
    decode_s: Positive | None = None
    """Seconds that an engine takes to decode one token for all its rows, apart from `simulation.decode_row_s`. Unset:
    0.02."""
    decode_row_s: NonNegative = 0.0
    """Seconds that each row in an engine adds to `simulation.decode_s`."""
    latency_s: NonNegative | None = None
    """Median seconds to generate a group, independent of response lengths and of the engine's other work, as with tools
    or a remote service. If this key is set, the keys about decoding have no effect. Unset: `scripted.latency_s` with
    `rollout.engine=scripted`, else 0, which makes engines decode token by token."""
    latency_sigma: NonNegative | None = None
    """Sigma of the log-normal distribution around `simulation.latency_s`. Unset: `scripted.latency_sigma`."""
    request_s: NonNegative | None = None
    """Seconds per group in addition to decoding, for prefill, environment and rewards. Unset: 0."""

    train_token_s: NonNegative | None = None
    """Seconds that the whole trainer takes for the forward and backward pass of one token of a prompt or response.
    Unset: 1e-5, or 0 with `trainer.backend=scripted`."""
    logprob_token_s: NonNegative | None = None
    """Seconds that the whole trainer takes for all log-prob passes over one token. Unset: a third of
    `simulation.train_token_s` if the run has such passes, else 0."""
    train_row_s: NonNegative | None = None
    """Seconds that the whole trainer takes per row in addition to the time for the row's tokens. Unset:
    `scripted.train_row_s` divided by `trainer.dp` with `trainer.backend=scripted`, else 0."""
    chunk_s: NonNegative | None = None
    """Seconds that the trainer takes per chunk (groups that are trained on together) in addition to the time for its
    rows. A step of `sync` and `async` has one chunk. Unset: 0."""
    plan_s: NonNegative | None = None
    """Seconds that the controller takes to plan a chunk, while the trainer waits. Unset: 0."""
    chunk_groups: Count | None = None
    """Number of groups that `streaming` trains on together, as a chunk. Unset: `algorithm.chunk_groups`, or its
    default."""
    train_step_s: NonNegative | None = None
    """Seconds that the trainer takes per step in addition to the time for its rows, for the optimizer, checkpoints and
    metrics. Unset: `scripted.train_step_s` with `trainer.backend=scripted`, else 0."""

    controller_s: NonNegative | None = None
    """Seconds that the controller takes in each step to plan, log and clear rows, while the trainer waits. Unset: 0."""
    controller_row_s: NonNegative = 2e-6
    """Seconds by which `simulation.controller_s` grows with each row that `simulation.batch_grows` adds to a step. The
    default was measured in runs of the quickstart with 256 and 1024 rows per step."""
    sync_s: NonNegative | None = None
    """Seconds of a weight sync, during which the trainer waits. Unset: 1, or with `simulation.weights_gb` the least
    time in which the weights can arrive."""
    pause_s: NonNegative | None = None
    """Seconds at the end of a weight sync during which engines are paused. Unset: the whole sync."""

    call_s: NonNegative | None = None
    """Seconds that a call of the data plane takes. Unset: 0.001."""
    gib_per_s: Positive = 1.0
    """Bandwidth of the data plane in GiB/s. Each put of a rollout gets this full bandwidth; all reads of the trainer
    share it. On several hosts, the reads are not faster than `simulation.unit_gib_per_s` and
    `simulation.link_gbit_per_s` allow."""
    put_bytes: NonNegative | None = None
    """Bytes that a rollout writes to the data plane per token. Unset: 21."""
    got_bytes: NonNegative | None = None
    """Bytes that the trainer reads from the data plane per token, in all passes together. Unset: 40."""

    put_groups: Positive | None = None
    """Least number of groups that a rollout actor usually puts together. Groups that finish during a put are put
    together in the next one, too. Unset: 1."""
    directory_put_s: NonNegative | None = None
    """CPU seconds that the directory of the data plane takes for a put, apart from `simulation.directory_row_s`. Unset:
    0.00036, as measured with groups of 8 rows on a CPU of two cores."""
    directory_claim_s: NonNegative | None = None
    """CPU seconds that the directory takes for a chunk that the trainer claims, releases and clears, with its other
    calls of a step, apart from `simulation.directory_row_s`. Unset: 0.0016, as measured in runs of the quickstart."""
    directory_row_s: NonNegative | None = None
    """CPU seconds that the directory takes for a row, from its put until it is cleared. Unset: 3.5e-6, as measured in
    runs of the quickstart."""
    directory_shards: Count = 1
    """Number of processes that share the work of the directory evenly. This is an assumption: the rows of a run's step
    are in one partition, which `dataplane.directory_shards` does not divide."""
    unit_gib_per_s: Positive = 1.5
    """Speed in GiB/s at which one storage unit sends rows to other hosts. The default was measured by `headrace bench
    transfer` for the store `tcp` over sockets, on a CPU of two cores."""

    host_gpus: Count = 8
    """Number of GPUs of a host. Rows and weights between processes of a host do not use a link."""
    engine_gpus: Count | None = None
    """Number of GPUs of an engine. Unset: `rollout.tp`."""
    train_share: Share | None = None
    """Share of the hosts that have train workers; the other hosts have the engines. 1 if every host has both. Unset:
    0.5 with `resources.layout=separate`, else 1."""
    links: Count = 1
    """Number of network links of a host. Rows and a single sender of weights use one of them."""
    link_gbit_per_s: Positive = 400.0
    """Speed of a network link in Gbit/s, in each direction."""
    link_share: Share = 0.85
    """Share of a link's speed that rows and weights reach. The default is the least that `headrace bench hosts` asks
    for."""
    far_share: Share = 1.0
    """Share of the bytes of rows that are read on another host than they were written on. It is 0 on a single
    host."""
    weights_gb: NonNegative | None = None
    """Size of the weights that engines receive in a weight sync, in units of 1e9 bytes. `simulation.sync_s` then grows
    or shrinks with the time that links need for them at each number of GPUs. Unset: a weight sync takes equally long at
    each number of GPUs."""
    weights_gb_per_s: Positive = 290.0
    """Speed in units of 1e9 bytes per second at which engines of the sender's host receive weights. The default was
    measured by `headrace bench weights` on two H200s: 4.06 GB in 13.8 ms."""
    weights_senders: Literal["one", "all"] | None = None
    """Train workers that send weights: only rank 0, or each the part that it holds. Unset: `all` with
    `sync.transport=pairs`, else `one`."""
    weights_copies: Positive = 1.0
    """Number of copies of the weights that leave the host of a single sender. A broadcast by NCCL passes each link once
    (not measured on several hosts); by gloo, it took 2 copies for two engines on another host."""

    gpus: Count = 1
    """Number of GPUs to which the values of this section apply; `--gpus` scales them to other numbers of GPUs."""
    scaling_efficiency: Share = 1.0
    """Share of each GPU's training speed that is kept when the number of GPUs doubles."""
    batch_grows: bool = False
    """If true, `algorithm.prompts_per_step` and the groups of a chunk grow with the number of GPUs."""


class _SimulationFile(Section):
    """The part of a run's configuration file that only `headrace simulate` reads."""

    simulation: SimulationConfig


def simulation_section(config: Config) -> SimulationConfig:
    """Check and return the section `simulation` of a run's configuration. Raises ConfigError when a key or value is
    wrong."""
    return validated(_SimulationFile, {"simulation": config.simulation}).simulation
