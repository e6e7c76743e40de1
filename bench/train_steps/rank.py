"""Measures train steps in one rank's process: a check against float32, timed steps, a profile, and plain torch."""

from __future__ import annotations

import gc
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from ...actors.engines.config import RouterReplayConfig
from ...actors.train_backend import MicroBatch
from ...codecs.tokens.routes import RouteSpec
from ...trainers.backends.config import BackendConfig, TrainerConfig
from ...trainers.backends.factory import build_backend
from ...trainers.backends.throughput import BACKWARD, BF16_PEAKS, flop_model
from ...trainers.cluster.engine_specs import GPU_WORKER_THREADS
from ..records import note
from .by_hand import LOSS, PlainStep, Rows, by_hand, micro_batch, random_rows
from .families import profiled

GIB = 2**30
_TIMEOUT = timedelta(seconds=300)
_CHECK_LENGTHS = (40, 7, 150, 91, 2, 200)
UNCOUNTED = 2
"""Number of first steps that are not counted, because kernels are chosen or compiled and memory is reserved in them."""
CHECK, PROFILE, PLAIN = "check of a small model's step", "profile of a step", "plain torch"
"""Names of the parts that are measured in addition to the steps."""


def step_name(number: int) -> str:
    """Return the name of the step with this number. The first has the number 0."""
    return f"step {number + 1}"


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Settings of the processes that measure train steps."""

    model: str
    """Path of the model folder whose steps are timed."""
    small: str
    """Path of the folder of a small model of the same family, which is checked against float32 on the CPU."""
    trainer: dict[str, Any]
    """The section `trainer` of the configuration, with all its keys."""
    tokens: int
    """Largest number of tokens of a microbatch."""
    row_tokens: int
    """Number of tokens of each row; 0 for rows of random lengths."""
    micros: int
    steps: int
    prompt_share: float
    """Share of a row's tokens that belong to its prompt and have no loss."""
    skew: float
    """Number of tokens of one expert of each layer, as a multiple of the mean over its experts; the tokens then have
    made-up routes, which are replayed. 0 for the routers' own choice."""
    plain: bool
    """True if plain torch makes the same step, too. This requires that there is only one rank."""
    folder: str
    """Folder for the rendezvous, checkpoints and the figures of each rank."""
    notes: str
    """File to which rank 0 appends each step's figures as it ends."""

    def note(self, rank: int, **figures: Any) -> None:
        """Append figures to the file of notes. Ranks other than 0 do nothing."""
        if rank == 0:
            note(Path(self.notes), **figures)

    @property
    def config(self) -> TrainerConfig:
        return TrainerConfig.model_validate(self.trainer)


@dataclass(frozen=True, slots=True)
class TrainFigures:
    """Figures of one rank. Sizes are in GiB and times in seconds; those of the steps are medians.

    If a rank ended early, the figures that it did not reach are NaN or empty.
    """

    tokens: int
    """Number of tokens of a step on the first rank of a replica; 0 on its other ranks, because they share the rows."""
    build_s: float
    """Seconds that it took to build the train backend and read its weights."""
    step_s: float
    steps_s: tuple[float, ...]
    """Seconds of each step, including the first ones that are not counted."""
    flops: float
    """FLOPs of a step of this rank's replica divided by the number of its ranks (see `step_flops`). Recomputed work
    does not count."""
    mfu: float | None
    """FLOPs per second divided by the device's peak for dense bfloat16; None where the peak is not known."""
    peak_gib: float
    families: dict[str, float]
    """Seconds of each family of kernels in one additional step (see the module `families`)."""
    longest: tuple[tuple[str, float], ...]
    """Names and seconds of the kernels that took longest in that step."""
    check: dict[str, float]
    """Differences to float32 on the CPU: `loss_off`, `gradient_off` (norm of the difference over the norm) and
    `logprob_off`, and the loss itself. The prefix is `exact.` for a step in float32 and `own.` for one in the trainer's
    precision."""
    first_loss: float
    first_norm: float
    plain: dict[str, float]
    """`step_s`, `peak_gib`, `first_loss` and `first_norm` of the step in plain torch; {} if it was not made."""
    plain_problem: str
    """Reason why plain torch gave no figures; "" if it gave them or was not asked for."""


def run_rank(rank: int, task: TrainTask) -> None:
    """Measure one rank and write its figures into the task's folder. Collective."""
    disable_progress_bar()
    device = _device(rank)
    if device.type == "cuda":
        torch.set_num_threads(GPU_WORKER_THREADS)  # Train workers of a run have the same number.
    world = task.config.topology.world
    with ExitStack() as stack:
        if world > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            address = f"file://{task.folder}/rendezvous"
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=_TIMEOUT)
            stack.callback(dist.destroy_process_group)
        _measure(rank, world, device, task)


def read_figures(folder: str, rank: int) -> TrainFigures | None:
    """Return the figures that `run_rank` has written so far for a rank; None if there are none."""
    path = _path(folder, rank)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    found["steps_s"], found["longest"] = tuple(found["steps_s"]), tuple(map(tuple, found["longest"]))
    return TrainFigures(**found)


def _path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _measure(rank: int, world: int, device: torch.device, task: TrainTask) -> None:
    task.note(rank, phase=CHECK)
    checked = _check(rank, world, task)
    task.note(rank, check=checked)
    topology = task.config.topology
    place = topology.place(rank)
    drawn = [_rows(task, place.dp * task.micros + number) for number in range(task.micros)]
    spec = RouteSpec.of(AutoConfig.from_pretrained(task.model)) if task.skew else None
    micros = [micro_batch(rows, range(len(rows.ids)), task.prompt_share, spec, task.skew) for rows in drawn]
    lengths = np.concatenate([micro.lengths for micro in micros])
    flops = step_flops(AutoConfig.from_pretrained(task.model), lengths) / topology.replica_size
    device_peak = BF16_PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    known = device_peak is not None and task.config.mixed_precision
    figures = TrainFigures(
        tokens=int(lengths.sum()) if rank == topology.writer(place.dp) else 0,
        build_s=math.nan, step_s=math.nan, steps_s=(), flops=flops, mfu=None, peak_gib=math.nan, families={},
        longest=(), check=checked, first_loss=math.nan, first_norm=math.nan, plain={}, plain_problem="",
    )  # fmt: skip

    def write(ours: _Ours) -> TrainFigures:
        counted = ours.seconds[UNCOUNTED:]
        median = statistics.median(counted) if counted else math.nan
        first = {"first_loss": ours.first["train/loss"], "first_norm": ours.first["train/grad_norm"]}
        found = replace(
            figures, build_s=ours.build_s, step_s=median, steps_s=ours.seconds, peak_gib=ours.peak_gib,
            families=ours.families, longest=ours.longest,
            mfu=flops / median / device_peak if counted and known and device_peak else None, **first,
        )  # fmt: skip
        _write(found, task.folder, rank)
        return found

    _write(figures, task.folder, rank)
    figures = write(_ours(rank, world, device, task, micros, write))
    if task.plain:
        task.note(rank, phase=PLAIN)
        plain, problem = _plain(device, task, drawn)
        _write(replace(figures, plain=plain, plain_problem=problem), task.folder, rank)


def _write(figures: TrainFigures, folder: str, rank: int) -> None:
    path = _path(folder, rank)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(asdict(figures)))
    beside.replace(path)  # The rename keeps the file whole even if this process is ended.


@dataclass(frozen=True, slots=True)
class _Ours:
    build_s: float
    seconds: tuple[float, ...]
    first: dict[str, float]
    """Metrics of the first step."""
    peak_gib: float
    families: dict[str, float]
    longest: tuple[tuple[str, float], ...]


def _ours(
    rank: int, world: int, device: torch.device, task: TrainTask, micros: Sequence[MicroBatch],
    keep: Callable[[_Ours], object],
) -> _Ours:  # fmt: skip
    """Make the steps with a train backend, and free it. Collective. keep: function that gets the figures after each
    step."""
    task.note(rank, phase="building the train backend")
    _reset_peak(device)
    started = time.perf_counter()
    backend = _fresh_backend(task.model, task.config, rank, world, replays=bool(task.skew))
    _wait(device)
    build_s = time.perf_counter() - started

    def step() -> dict[str, float]:
        backend.begin_step()
        backend.accumulate(iter(micros), len(micros))
        return backend.finish_step()

    seconds, metrics = list[float](), list[dict[str, float]]()
    found = _Ours(build_s, (), {}, math.nan, {}, ())
    for number in range(task.steps):
        task.note(rank, phase=f"{step_name(number)} of {task.steps}")
        started = time.perf_counter()
        metrics.append(step())
        _wait(device)
        seconds.append(time.perf_counter() - started)
        task.note(rank, step_s=seconds[-1], metrics=metrics[-1])
        found = _Ours(build_s, tuple(seconds), metrics[0], _peak_gib(device), {}, ())
        keep(found)
    task.note(rank, phase=PROFILE)
    families, longest = profiled(step, device)
    backend.close()
    return replace(found, families=families, longest=tuple(longest))


def _fresh_backend(model: str, trainer: TrainerConfig, rank: int, world: int, *, replays: bool = False) -> Any:
    """Build a train backend as if it were the first of this process. torch.compile counts the compilations of a layer's
    code over all models of a process, and stops compiling after the eighth."""
    torch.compiler.reset()
    replay = RouterReplayConfig(enabled=replays, native_agreement_every=0)
    return build_backend(BackendConfig(model, trainer, LOSS, router_replay=replay), rank, world)


def step_flops(config: Any, lengths: np.ndarray) -> float:
    """Return the model FLOPs of a forward and a backward pass over rows of these lengths (int64 `[N]`).

    They are 6 FLOPs for each token and each parameter that the token uses, plus the FLOPs of causal attention.

    Only parameters of matrices count. An untied embedding counts in addition to the output layer; a tied one counts
    once. Of the experts, only those count that the token is routed to.
    """
    model = flop_model(config)
    assert model is not None, config.model_type
    tied = config.tie_word_embeddings
    per_token = model.per_token + model.per_logits * (1 if tied else 2)
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    return 2.0 * BACKWARD * (per_token * float(lengths.sum()) + model.per_pair * pairs)


def _rows(task: TrainTask, seed: int) -> Rows:
    """Return the rows of one microbatch with at most `task.tokens` tokens in all."""
    config = AutoConfig.from_pretrained(task.model)
    rng = np.random.default_rng(seed)
    if task.row_tokens:
        lengths = np.full(task.tokens // task.row_tokens, task.row_tokens)
    else:
        longest = min(4096, config.max_position_embeddings, task.tokens)
        drawn = np.clip(rng.lognormal(6.5, 0.7, task.tokens), longest // 64, longest).astype(int)
        lengths = drawn[: int(np.searchsorted(np.cumsum(drawn), task.tokens, side="right"))]
        lengths = np.append(lengths, task.tokens - int(lengths.sum()))  # The last row fills the microbatch.
        lengths = lengths[lengths > 1]
    return random_rows(seed, lengths.tolist(), config.vocab_size)


# ---------------- These functions compare two steps with float32 on the CPU.


def _check(rank: int, world: int, task: TrainTask) -> dict[str, float]:
    """Compare two steps of the small model, in float32 and in the trainer's precision, with float32 on the CPU."""
    vocabulary = AutoConfig.from_pretrained(task.small).vocab_size
    rows = random_rows(1, check_lengths(task.config.dp), vocabulary)
    columns, loss, wanted = by_hand(task.small, rows)
    found: dict[str, float] = {"loss": loss}
    for name, half in (("exact", False), ("own", task.config.mixed_precision)):
        trainer = task.config.model_copy(update={"mixed_precision": half, "grad_clip": None, "weight_decay": 0.0})
        loss_off, gradient_off, logprob_off = _step_off(rank, world, task, trainer, rows, columns, loss, wanted)
        found |= {f"{name}.loss_off": loss_off, f"{name}.gradient_off": gradient_off}
        found |= {f"{name}.logprob_off": logprob_off}
    return found


def check_lengths(replicas: int) -> list[int]:
    """Return the number of tokens of each row of the check. Each replica has at least one row in both microbatches."""
    return [_CHECK_LENGTHS[row % len(_CHECK_LENGTHS)] for row in range(max(len(_CHECK_LENGTHS), 2 * replicas))]


def halves(rows: Rows, replica: int, replicas: int) -> tuple[range, range]:
    """Return the rows of the two microbatches of a replica. All replicas together have each row once."""
    mine = range(replica, len(rows.ids), replicas)
    return mine[: len(mine) // 2], mine[len(mine) // 2 :]


def _step_off(
    rank: int, world: int, task: TrainTask, trainer: TrainerConfig, rows: Rows, columns: Sequence[torch.Tensor],
    loss: float, wanted: dict[str, torch.Tensor],
) -> tuple[float, float, float]:  # fmt: skip
    """Return the differences of the loss, gradient and log-probs of one step to those on the CPU. Collective."""
    topology = trainer.topology
    backend = _fresh_backend(task.small, trainer, rank, world)
    every = backend.logprobs([micro_batch(rows, range(len(rows.ids)))], 1)
    backend.begin_step()
    backend.accumulate(
        iter([micro_batch(rows, part) for part in halves(rows, topology.place(rank).dp, topology.dp)]), 2
    )
    metrics = backend.finish_step()
    path = f"{task.folder}/check-{int(trainer.mixed_precision)}"
    backend.save(path)
    backend.close()
    gc.collect()
    # After one step, AdamW's first moment is the gradient times (1 - its decay rate).
    share = 1.0 - trainer.betas[0]
    difference = square = 0.0
    stored = _stored(path)
    wanted = _of_adapter(wanted, stored, trainer.lora.scaling) if trainer.lora.rank else wanted
    for name, gradient in wanted.items():
        # Megatron's state has a separate dimension for the gate and up matrices of experts.
        ours = stored[f"optimizer.{name}.exp_avg"].reshape(gradient.shape) / share
        difference += float((ours - gradient).double().square().sum())
        square += float(gradient.double().square().sum())
    logprob_off = max((float((one - torch.cat(list(columns))).abs().max()) for one in every), default=0.0)
    return abs(metrics["train/loss"] - loss), (difference / square) ** 0.5, logprob_off


def _of_adapter(
    wanted: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """Return the gradients of the matrices B of an adapter, given those of the weights W of the model.

    A layer computes `(W + scaling B A) x`, so that the gradient of B is `scaling` times that of W times the transpose
    of A. That of A is 0 in the first step, because B is 0. stored: the checkpoint after that step, with A.
    """
    ending = ".lora_A.weight"
    layers = [name.removeprefix("model.").removesuffix(ending) for name in stored if name.endswith(ending)]
    layers = [name for name in layers if f"model.{name}{ending}" in stored]
    return {
        f"{name}.lora_B.weight": scaling * wanted[f"{name}.weight"] @ stored[f"model.{name}{ending}"].T
        for name in layers
    }


def _stored(path: str) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in _flat(state) if isinstance(value, torch.Tensor)}


def _flat(state: dict[str, Any], prefix: str = "") -> Any:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ---------------- These functions measure the same steps in plain torch.


def _plain(device: torch.device, task: TrainTask, drawn: Sequence[Rows]) -> tuple[dict[str, float], str]:
    """Return the figures of the same steps in plain torch and "", or {} and the reason why there are none."""
    gc.collect()
    _reset_peak(device)
    trainer = task.config
    try:
        plain = PlainStep(
            task.model, device, half=trainer.mixed_precision, recompute=trainer.recompute != "none", lr=trainer.lr
        )
        steps = [plain.run(drawn, task.prompt_share) for _ in range(max(3, task.steps - 2))]
    except torch.cuda.OutOfMemoryError as error:
        return {}, f"plain torch ran out of memory: {str(error).splitlines()[0]}"
    loss, norm, _ = steps[0]
    seconds = statistics.median(seconds for _, _, seconds in steps[1:])
    found = {"step_s": seconds, "peak_gib": _peak_gib(device), "first_loss": loss}
    # Plain torch trains all weights, so that an adapter's gradient has another norm.
    return found if trainer.lora.rank else {**found, "first_norm": norm}, ""


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: torch.device) -> float:
    """Return the peak GiB of tensors on the device since `_reset_peak`; on a CPU, the peak of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
