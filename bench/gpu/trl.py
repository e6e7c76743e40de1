"""Runs TRL for comparison in `headrace bench gpu`: one colocated GPU, the same model, prompts, batch and limits."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from ...trainers.errors import UserError
from .nvml import visible_gpus
from .train_run import end_process, start_process
from .works import GrpoWork

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class TrlTask:
    """Settings of one run of TRL; `peers.trl_step` reads them from a JSON file."""

    model: str
    """Path of the model folder, with the prompts."""
    steps: int
    prompts: int
    """Number of prompts of a step."""
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    micro: int
    """Number of rows of a microbatch."""
    memory: float
    """Share of the GPU's memory that vLLM takes."""
    recompute: bool
    """True if the backward pass recomputes activations."""
    vllm: bool
    """True if vLLM generates on a GPU; otherwise the model itself generates on the CPU."""

    @staticmethod
    def of(work: GrpoWork, model: Path, steps: int, *, gpu: bool) -> TrlTask:
        """Return the settings for a work. gpu: whether this machine has a GPU."""
        rows = work.prompts * work.group_size
        return TrlTask(
            str(model), steps, work.prompts, work.group_size, work.prompt_tokens[1], work.max_new_tokens,
            min(work.trl_micro, rows), work.trl_memory, work.trl_recompute, gpu,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """Figures of one run of TRL."""

    seconds: tuple[float, ...]
    """Wall seconds of each step, the first included."""
    grad_norms: tuple[float, ...]
    """Gradient norm of each step, as TRL logs it."""
    peak_gib: float
    """Peak memory of the process's own tensors on the GPU in GiB, without the process of vLLM."""
    problem: str
    """Sentence about why the run did not finish; "" if it did."""

    @property
    def step_s(self) -> float:
        """Median seconds of a step, without the first; NaN if there was only one."""
        return statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else math.nan


def check_trl() -> str:
    """Return the installed version of TRL. Raises UserError when it is not installed."""
    if find_spec("trl") is None:
        raise UserError("--baseline: got 'trl', which is not installed: pip install trl==1.16.0")
    return importlib.metadata.version("trl")


def run_trl(
    task: TrlTask, stem: Path, limit_s: float, tell: Callable[[str], None], keep: Callable[[TrlOutcome], None]
) -> None:
    """Run TRL in a separate process. Its settings, output and figures are written to `stem` with the suffixes
    .task.json, .txt and .json.

    limit_s: seconds after which the process is ended. keep: function that gets the figures of the steps that were made,
    even if this function is interrupted.
    """
    settings, result, output = (stem.with_name(stem.name + end) for end in (".task.json", ".json", ".txt"))
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(asdict(task)))
    deadline = time.monotonic() + limit_s
    environment = dict(os.environ)
    if task.vllm:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(1))
    process = start_process("headrace.bench.peers.trl_step", [str(settings), str(result)], output, environment)
    why = "interrupted"
    try:
        while process.poll() is None and time.monotonic() < deadline:
            done = len(read_trl(result).seconds)
            tell(f"{stem.name}: {done} of {task.steps} steps made" if done else f"{stem.name}: starting")
            time.sleep(_LOOK_S)
        code = process.poll()
        why = "" if code == 0 else f"ended with exit code {code}"
        if code is None:
            why = f"ended after its limit of {limit_s:g} s"
    finally:
        end_process(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # This ends vLLM's processes, which TRL's process does not wait for.
        keep(read_trl(result, f"trl: {why}; its output is in {output}" if why else ""))


def read_trl(path: Path, problem: str = "") -> TrlOutcome:
    """Return the figures in the JSON file that `peers.trl_step` writes after each step; none if it is not there."""
    if not path.exists():
        return TrlOutcome((), (), 0.0, problem)
    result = json.loads(path.read_text())
    norms = [log["grad_norm"] for log in result["logs"] if "grad_norm" in log]
    return TrlOutcome(tuple(result["seconds"]), tuple(norms), result["peak_gib"], problem)


def best(outcomes: Sequence[TrlOutcome]) -> TrlOutcome | None:
    """Return the run whose steps were the fastest; None if no run gave figures."""
    done = [outcome for outcome in outcomes if not math.isnan(outcome.step_s)]
    return min(done, key=lambda outcome: outcome.step_s) if done else None
