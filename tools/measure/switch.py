"""`tools/measure/gpu.py --work switch-2g` times what a switch of roles costs each side of a GPU that both roles share.

The engine sleeps, wakes and takes new weights over CUDA IPC from a trainer on the same GPU, as in `headrace bench
weights --gpus 1`. A train backend offloads and onloads in processes of its own, one for each GPU, when the engine is
gone.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.gpu.work_report import WorkReport
from headrace.bench.gpu.works import parse_layout
from headrace.bench.models import SHAPES, FolderTask, make_folder
from headrace.bench.records import conditions
from headrace.bench.train_steps.spawned import run_ranks
from headrace.tools.measure.switch_trainer import SwitchFigures, SwitchTask, read_figures, run_rank, wrong
from headrace.tools.measure.works import SWITCH_WORKS
from headrace.trainers.errors import UserError

if TYPE_CHECKING:
    from headrace.tools.measure.switch_engine import KeptLog

TRAINER = "trainer's offload and onload"
"""Name of the part that train ranks measure."""


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """Options of `tools/measure/gpu.py` for the works `switch-*`."""

    out: Path
    """Folder for the results."""
    work: str
    """Name of the work, a key of `works.SWITCH_WORKS`."""
    backend: str = "fsdp"
    """Train backend, `fsdp` or `megatron`."""
    cycles: int = 6
    """Number of times that each side gives its GPU up and takes it back, at least 2. The first is not counted."""
    layouts: tuple[str, ...] = ("colocated-1",)
    """One layout `colocated-N`: N train ranks, each on a GPU of its own. The engine is on the first."""


def run_switch(options: SwitchOptions, report: WorkReport) -> None:
    """Time the switches of engine and trainer, and write results.jsonl and summary.json, also if interrupted. Raises
    UserError on a machine without a GPU."""
    gpus = _num_ranks(options)
    from headrace.tools.measure.switch_engine import (  # imports vLLM, which a machine without a GPU need not have
        KeptLog,
        measure_engine,
    )

    engine_size, trainer_size = SWITCH_WORKS[options.work]
    options.out.mkdir(parents=True, exist_ok=True)
    report.conditions = conditions(
        gpus=[torch.cuda.get_device_name(number) for number in range(gpus)],
        work=options.work, backend=options.backend, cycles=options.cycles,
    )  # fmt: skip
    report.tell.plan(*(f"cycle {number} of the engine" for number in range(1, options.cycles + 1)), TRAINER)
    with tempfile.TemporaryDirectory(prefix="headrace-switch-") as folder:
        log = KeptLog(Path(folder), report.tell)
        with report.kept(lambda: _judge(report, log, folder, gpus)):
            report.tell("engine: start")
            measure_engine(engine_size, options.cycles, Path(folder), log)
            report.tell("trainer: making the model")
            task = FolderTask(SHAPES[trainer_size], "bfloat16", 672, (16, 32), num_prompts=8)
            make_folder(Path(folder, "model"), task, "cuda")
            report.tell("trainer: start")
            model = str(Path(folder, "model"))
            trainer = SwitchTask(model, task.shape.tokens, options.backend, gpus, options.cycles, folder)
            run_ranks(run_rank, trainer, gpus, trainer.notes, report.tell)


def _judge(report: WorkReport, log: KeptLog, folder: str, num_ranks: int) -> None:
    """Fill in the figures of the report from the engine's log and from what the ranks have written."""
    ranks = [figures for rank in range(num_ranks) if (figures := read_figures(folder, rank)) is not None]
    ranks = ranks if len(ranks) == num_ranks else []
    for number in range(1, log.cycles + 1):
        report.tell.finish(f"cycle {number} of the engine")
    if ranks:
        report.tell.finish(TRAINER)
    report.summary = summarise_switch(report.work, log.records, ranks)
    report.complaints = [*log.failures]
    report.complaints += [f"rank {rank}: {line}" for rank, figures in enumerate(ranks) for line in wrong(figures)]
    report.records = [*log.records, *({"record": "trainer", **asdict(figures)} for figures in ranks)]


def summarise_switch(work: str, records: list[dict[str, Any]], ranks: list[SwitchFigures]) -> dict[str, float]:
    """Return the flat summary, `gpu.{work}.{figure}`, from medians of cycles. They are those of the engine's cycles
    without the first, and of the trainer's slowest rank. `offload_vs_link` and `onload_vs_link` are its seconds over
    those of a copy of the same bytes."""
    cycles = [record for record in records if record["record"] == "colocated"][1:]
    found: dict[str, float] = {}
    if cycles:
        found["engine_sleep_s"] = statistics.median(record["sleep_s"] for record in cycles)
        found["engine_wake_and_update_s"] = statistics.median(
            record["update_s"] + record["wake_s"] for record in cycles
        )
    if ranks and min(figures.num_bytes for figures in ranks) > 0:
        slowest = max(ranks, key=lambda one: statistics.median(one.offload_s) + statistics.median(one.onload_s))
        found |= {
            "offload_s": statistics.median(slowest.offload_s),
            "first_offload_s": slowest.first_offload_s,
            "onload_s": statistics.median(slowest.onload_s),
            "offload_vs_link": slowest.offload_vs_link,
            "onload_vs_link": slowest.onload_vs_link,
            "offloaded_bytes": float(slowest.num_bytes),
            "link_to_host_gb_per_s": slowest.num_bytes / slowest.to_host_s / 1e9,
            "link_to_device_gb_per_s": slowest.num_bytes / slowest.to_device_s / 1e9,
            "nccl_teardown_s": slowest.group_teardown_s,
            "nccl_rebuild_s": slowest.group_rebuild_s,
        }
    return {f"gpu.{work}.{name}": value for name, value in found.items()}


def _num_ranks(options: SwitchOptions) -> int:
    """Return the number of train ranks. Raises UserError if this machine has too few GPUs."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise UserError(f"--work: got {options.work!r} on a machine without a GPU, expected grpo-tiny")
    layouts = [parse_layout(text, gpus) for text in options.layouts]
    if [layout.name for layout in layouts] != ["colocated"]:
        raise UserError(
            f"--layout: got {' '.join(options.layouts)}, expected one layout colocated-N for {options.work}"
        )
    return layouts[0].gpus
