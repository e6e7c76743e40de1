"""`headrace bench gpu --work train-*` times train steps alone, and shows the kernels that take their time.

A train backend trains a model with random weights on made-up packed rows, with one process per rank. First, a step of a
small model is compared with float32 on the CPU. At the end, plain torch makes the same step.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...actors.engines.config import ModelConfig
from ...trainers.cluster.gpu_memory import estimated_peak, model_size
from ...trainers.config.load import load_config
from ...trainers.errors import UserError
from ..gpu.work_report import WorkReport
from ..gpu.works import EXAMPLES, TRAIN_WORKS
from ..models import SHAPES, FolderTask, make_folder
from ..records import conditions
from .rank import CHECK, PLAIN, PROFILE, UNCOUNTED, TrainFigures, TrainTask, read_figures, run_rank, step_name
from .spawned import run_ranks

EXACT, HALF = 2e-3, 6e-2
"""Largest accepted differences of a step in float32 and of a step in bfloat16 to one in float32 on the CPU."""
MEMORY = 1.3
"""Largest accepted factor between the estimated and the measured peak of memory on a GPU, in both directions."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `headrace bench gpu` for the works `train-*`."""

    out: Path
    """Folder for the results."""
    work: str
    """Name of the work, a key of `works.TRAIN_WORKS`."""
    backend: str = "fsdp"
    """Train backend, `fsdp` or `megatron`."""
    steps: int | None = None
    """Number of steps; None means the number of the work."""
    layers: int | None = None
    """Number of layers; None means the number of the work."""
    tokens: int | None = None
    """Largest number of tokens of a microbatch; None means the number of the work."""
    micros: int | None = None
    """Number of microbatches of a step; None means the number of the work."""
    row_tokens: int = 0
    """Number of tokens of each row; 0 for rows of random lengths."""
    prompt_share: float = 0.0
    """Share of a row's tokens that have no loss."""
    skew: float = 0.0
    """Number of tokens of the most used expert of each layer, as a multiple of the mean; 0 for the routers' choice."""
    plain: bool = True
    """True to make the same step in plain torch as well, if there is only one rank."""
    model: Path | None = None
    """Model folder to use. It is made if it is missing, and kept; None means a folder that is removed at the end."""
    overrides: tuple[str, ...] = ()
    """Keys of the section `trainer`, as `trainer.key=value`."""


def run_train_steps(options: TrainOptions, report: WorkReport) -> None:
    """Make the models, measure in one process per rank, and write results.jsonl and summary.json, even if interrupted.
    Raises UserError before anything is started if the options do not fit this machine."""
    work, gpus = TRAIN_WORKS[options.work], torch.cuda.device_count()
    trainer = _trainer(options, gpus)
    shape = replace(SHAPES[work.size], layers=options.layers or work.layers)
    largest = shape.experts / shape.experts_per_token if shape.experts else 0
    if not 0 <= options.skew <= largest:
        raise UserError(f"--skew: got {options.skew:g}, expected a number from 0 to {largest:g} for {options.work}")
    tokens = max(options.tokens or work.tokens, options.row_tokens)
    small = replace(SHAPES["tiny-moe" if shape.experts else "tiny"], tied=shape.tied)
    options.out.mkdir(parents=True, exist_ok=True)
    world = trainer.topology.world
    with tempfile.TemporaryDirectory(prefix="headrace-train-") as folder:
        model = (options.model or Path(folder, "model")).resolve()
        task = TrainTask(
            str(model), str(Path(folder, "small")), trainer.model_dump(), tokens=tokens,
            row_tokens=options.row_tokens, micros=options.micros or work.micros, steps=options.steps or work.steps,
            prompt_share=options.prompt_share, skew=options.skew,
            plain=options.plain and world == 1 and not options.skew, folder=folder,
            notes=str(options.out / "notes.jsonl"),
        )  # fmt: skip
        report.conditions = conditions(
            gpus=[torch.cuda.get_device_name(number) for number in range(min(world, gpus))],
            work=options.work, layers=shape.layers, trainer=trainer.model_dump(), tokens=tokens,
            row_tokens=options.row_tokens, micros=task.micros, steps=task.steps, prompt_share=options.prompt_share,
            skew=options.skew,
        )  # fmt: skip
        report.tell.plan(*_parts(task))
        with report.kept(lambda: _judge(report, task, world)):
            report.tell("making the models")
            dtype = "bfloat16" if gpus else "float32"
            make_folder(model, FolderTask(shape, dtype, 672, (16, 32), num_prompts=8), "cuda" if gpus else "cpu")
            make_folder(Path(folder, "small"), FolderTask(small, "float32", 672, (16, 32), num_prompts=8), "cpu")
            report.tell("starting the processes")
            run_ranks(run_rank, task, world, Path(task.notes), report.tell)


def _parts(task: TrainTask) -> list[str]:
    return [CHECK, *map(step_name, range(task.steps)), PROFILE, *([PLAIN] if task.plain else [])]


def _judge(report: WorkReport, task: TrainTask, world: int) -> None:
    """Fill in the report from the figures that all ranks have written, with a complaint for each wrong figure."""
    ranks = [figures for rank in range(world) if (figures := read_figures(task.folder, rank)) is not None]
    if len(ranks) < world:  # A rank that has not begun has written no figures.
        return
    first = ranks[0]
    done = [CHECK, *map(step_name, range(min(len(one.steps_s) for one in ranks)))]
    done += [PROFILE] if first.families else []
    done += [PLAIN] if first.plain or first.plain_problem else []
    for part in done:
        report.tell.finish(part)
    report.summary = summarise(report.work, ranks)
    report.notes = [first.plain_problem] if first.plain_problem else []
    report.complaints = wrong(first, half=task.config.mixed_precision)
    peak, size = max(one.peak_gib for one in ranks), model_size(ModelConfig(path=task.model))
    if torch.cuda.is_available() and size is not None and not math.isnan(peak):
        trainer = task.config.model_copy(update={"tokens_per_microbatch": task.tokens})
        estimated = estimated_peak(trainer, size) / 2**30
        report.summary[f"gpu.{report.work}.estimate_over_peak"] = estimated / peak
        report.complaints += misjudged(estimated, peak)
    report.records = [{"op": "train-steps", "rank": rank, **_finite(figures)} for rank, figures in enumerate(ranks)]


def _finite(figures: TrainFigures) -> dict[str, Any]:
    return {name: value for name, value in asdict(figures).items() if not _is_nan(value)}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _trainer(options: TrainOptions, gpus: int) -> Any:
    if gpus == 0 and not options.work.startswith("train-tiny"):
        raise UserError(f"--work: got {options.work!r} on a machine without a GPU, expected a work named train-tiny*")
    if options.steps is not None and options.steps <= UNCOUNTED:
        raise UserError(
            f"--steps: got {options.steps}, expected at least {UNCOUNTED + 1}, as the first are not counted"
        )
    for override in options.overrides:
        if not override.startswith("trainer."):
            raise UserError(
                f"{override}: --work {options.work} makes only train steps, expected only keys of trainer.*"
            )
    given = [f"trainer.backend={options.backend}", "trainer.tokens_per_microbatch=131072", *options.overrides]
    given += [] if gpus else ["trainer.mixed_precision=false"]
    trainer = load_config(EXAMPLES / "gpu-0.6b.yaml", given).trainer
    if trainer.cp > 1:
        raise UserError(f"trainer.cp: got {trainer.cp}, expected 1, because the rows of this benchmark are not split")
    if gpus and trainer.topology.world > gpus:
        raise UserError(f"trainer: the mesh has {trainer.topology.world} ranks, expected at most {gpus}, one per GPU")
    return trainer


def summarise(work: str, ranks: Sequence[TrainFigures]) -> dict[str, float]:
    """Return the flat summary `gpu.{work}.{figure}`. Times are those of the slowest rank.

    `tokens_per_s` counts the tokens of all ranks, `tokens_per_s_per_gpu` those of one rank. `share.{family}` is the
    part of a step that the kernels of a family took on the first rank. `plain.{figure}` is a figure of plain torch.
    `vs_plain` is Headrace's seconds per step divided by those of plain torch, so that below 1 means faster. Unknown
    values are left out.
    """
    first, slowest = ranks[0], max(ranks, key=lambda one: one.step_s)
    tokens = sum(one.tokens for one in ranks)
    found: dict[str, float] = {
        "build_s": max(one.build_s for one in ranks),
        "step_s": slowest.step_s,
        "tokens_per_s": tokens / slowest.step_s,
        "tokens_per_s_per_gpu": tokens / slowest.step_s / len(ranks),
        "tflops_per_gpu": statistics.fmean(one.flops for one in ranks) / slowest.step_s / 1e12,
        "peak_gib": max(one.peak_gib for one in ranks),
        "first_loss": first.first_loss,
        "first_grad_norm": first.first_norm,
    }
    if first.mfu is not None:
        found["mfu"] = min(one.mfu for one in ranks if one.mfu is not None)
    whole = sum(first.families.values())
    found |= {f"share.{name}": seconds / whole for name, seconds in first.families.items() if whole}
    found["profiled_step_s"] = whole if first.families else math.nan
    found |= {f"check.{name}": value for name, value in first.check.items()}
    if first.plain:
        found |= {f"plain.{name}": value for name, value in first.plain.items()}
        found["vs_plain"] = slowest.step_s / first.plain["step_s"]
        found["loss_vs_plain"] = abs(first.first_loss - first.plain["first_loss"])
    if "first_norm" in first.plain:
        found["grad_norm_vs_plain"] = abs(first.first_norm / first.plain["first_norm"] - 1)
    return {f"gpu.{work}.{name}": value for name, value in found.items() if not _is_nan(value)}


def misjudged(estimated: float, peak: float) -> list[str]:
    """Return a sentence if the estimated peak of memory is far from the measured one. Both are in GiB."""
    if 1 / MEMORY <= estimated / peak <= MEMORY:
        return []
    return [f"the peak of memory is {peak:.1f} GiB, expected within {MEMORY}x of the estimate of {estimated:.1f} GiB"]


def wrong(figures: TrainFigures, *, half: bool) -> list[str]:
    """Return a sentence for each figure that shows a wrong computation."""
    found = []
    for name, most in (("exact", EXACT), ("own", HALF if half else EXACT)):
        for what in ("gradient", "logprob", "loss"):
            value = figures.check[f"{name}.{what}_off"]
            if not value <= most:
                found.append(f"the {what} of the small model ({name}) is {value:.3g} off, expected at most {most:g}")
    if "first_norm" in figures.plain and not abs(figures.first_norm / figures.plain["first_norm"] - 1) <= HALF:
        found.append(
            f"the first gradient norm is {figures.first_norm:.4g}, plain torch's is {figures.plain['first_norm']:.4g}"
        )
    return found
