"""Compares the trainer of a family on two ranks with the trainer on one rank, and runs all checks in forked processes.

Each check has processes of its own, which are forked from one process that has imported torch and transformers. One
that crashes, or hangs, ends no other check.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import run_on_ranks
from headrace.tests.trainers.backends.mesh_ranks import sent
from headrace.tests.trainers.families.checks import (
    LOGPROBS,
    MESH_GRADIENT,
    Outcome,
    Wrong,
    gradients_of_step,
    outcome_of,
    quiet,
    run_checks,
    settings,
)
from headrace.tests.trainers.families.plain import relative_error, rows_of
from headrace.tests.trainers.families.tiny_models import WITH_EXPERTS, save_family
from headrace.tests.trainers.families.vllm_check import SERVED, run_vllm_check
from headrace.trainers.backends.config import BackendConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend

MESHES: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "ep2": {"dp": 2, "ep": 2}, "cp2": {"cp": 2}}
"""Meshes of two ranks: name of the check -> sizes that are not 1."""
_SERVING = threading.Lock()
"""Only one engine of vLLM runs at a time, because it takes 2 GB and all cores."""
LIMIT_S = 120
"""Longest time of a process, in seconds. Most need a fiftieth of it."""


def run_family(name: str, folder: Path, *, serve: bool = False) -> dict[str, Any]:
    """Write the model `name` to `folder`, run all checks of it, and return its record (see `record_of`). serve: also
    serve it with vLLM, if it is one of `SERVED`."""
    begun = time.monotonic()
    [made] = in_processes(_save_and_check, 1, folder / "one", str(folder / "model"), name)
    found: dict[str, Outcome] = made if isinstance(made, dict) else {"padded": made}
    for mesh in MESHES:
        if mesh == "ep2" and name not in WITH_EXPERTS:
            continue
        if not (folder / "model" / "one_rank.pt").exists():
            found[mesh] = found["padded"]  # There is nothing to compare with.
            continue
        packing = "packed" if mesh == "cp2" and found["packed"].holds else "none"
        ranks = in_processes(_on_a_mesh, 2, folder / mesh, str(folder / "model"), name, mesh, packing)
        found[mesh] = max(ranks, key=lambda one: (not one.holds, one.figure))
    if serve and name in SERVED:
        with _SERVING:
            [found["vllm"]] = in_processes(_serve, 1, folder / "vllm", str(folder / "served"), name)
    return record_of(found, time.monotonic() - begun)


class Failed(Exception):
    """Ends the process of a rank, and with it that of the other rank. Its message is the rank's outcome as JSON."""


def in_processes(scenario: Callable[..., Any], num: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `scenario` as `run_on_ranks` does. If a process ends with an error or takes too long, the only result is the
    outcome that says so."""
    try:
        return run_on_ranks(scenario, num, folder, *arguments)
    except ProcessException as error:
        last = str(error).strip().splitlines()[-1]
        if Failed.__name__ in last:
            return [Outcome(**json.loads(last.partition(": ")[2]))]
        slow = "SIGALRM" in last
        return [Outcome("crashed", why="the check took too long" if slow else last)]


def record_of(found: dict[str, Outcome], seconds: float) -> dict[str, Any]:
    """Return what `build/families.json` has of a family: yes or no for each feature, reasons, and all outcomes."""

    def holds(*checks: str) -> bool:
        return all(check in found and found[check].holds for check in checks)

    return {
        "trains": holds("padded", "gradient", "step", "export", "resume"),
        **{mesh: holds(mesh) for mesh in MESHES},
        "packed": holds("packed", "packed gradient"),
        "engine": holds("engine", *(["vllm"] if "vllm" in found else [])),
        "replay": holds("replay"),
        "why": why(found),
        "seconds": round(seconds, 1),
        "checks": {check: asdict(one) for check, one in found.items()},
    }


def why(found: dict[str, Outcome]) -> str:
    """Return the reasons of all checks that do not hold, each reason once, with the names of its checks. A reason for
    which there is no trainer at all stands for all checks of the trainer."""
    checks: dict[str, list[str]] = {}
    for check, one in found.items():
        if not one.holds:
            checks.setdefault(f"{one.state}: {one.why}", []).append(check)
    texts = ("training" if {"padded", "step"} <= {*names} else ", ".join(names) for names in checks.values())
    return "; ".join(f"{text} {reason}" for text, reason in zip(texts, checks, strict=True))


def _save_and_check(rank: int, world: int, folder: str, name: str) -> dict[str, Outcome]:
    signal.alarm(LIMIT_S)
    quiet()
    save_family(folder, name)
    return run_checks(folder, name)


def _serve(rank: int, world: int, folder: str, name: str) -> Outcome:
    signal.alarm(2 * LIMIT_S)  # vLLM takes long to start.
    return run_vllm_check(folder, name)


def _on_a_mesh(rank: int, world: int, folder: str, name: str, mesh: str, packing: str) -> Outcome:
    """Return this rank's outcome: the largest error of the log-probs that it writes, and rank 0's of the gradient."""
    signal.alarm(LIMIT_S)
    quiet()
    config = settings(folder, packing=packing, topology=Topology(**{"dp": 1, **MESHES[mesh]}))
    outcome = outcome_of(lambda: mesh_errors(rank, config, name), LOGPROBS)
    if outcome.figure is not None:
        return outcome
    if "gloo" in outcome.why:
        time.sleep(5)  # The other rank's process ends now, and its error says why.
    raise Failed(json.dumps(asdict(outcome)))


def mesh_errors(rank: int, config: BackendConfig, name: str) -> float | Outcome:
    """Return the largest error of a log-prob on this rank, or the outcome of a wrong gradient. Collective.

    Raises `Wrong` if the mesh splits nothing.
    """
    expected = torch.load(f"{config.model}/one_rank.pt")
    topology, rows = config.topology, rows_of(name)
    place = topology.place(rank)
    columns = dict(zip(map(id, rows), expected["logprobs"].split([len(row.ids) for row in rows]), strict=True))
    own = rows[place.dp :: topology.dp]
    with contextlib.closing(FsdpBackend(config, rank, topology.world)) as trainer:
        micros = [sent(part, topology, place, rows) for part in (own[: len(own) // 2], own[len(own) // 2 :])]
        with used_shapes(trainer._policy.model) as used:
            found = trainer.logprobs(micros, len(micros))
        error = 0.0
        if rank == topology.writer(place.dp):
            error = float((torch.cat(found) - torch.cat([columns[id(row)] for row in own])).abs().max())
        gradient = gradients_of_step(trainer, micros)
    whole: dict[str, torch.Tensor] = expected["gradient"]
    split = [path for path, shape in used.items() if path in whole and shape != whole[path].shape]
    if topology.tp > 1 and not split or topology.ep > 1 and not any(".experts." in path for path in split):
        raise Wrong("each rank computes with all weights")
    if rank == 0 and (off := relative_error(gradient, whole)) > MESH_GRADIENT:
        return Outcome("wrong", max(error, off), f"gradient {off:.0e}, above {MESH_GRADIENT:.0e}")
    return error


@contextlib.contextmanager
def used_shapes(model: torch.nn.Module) -> Iterator[dict[str, torch.Size]]:
    """Context manager that provides the shapes of the weights that this rank's modules compute with, by name."""
    shapes: dict[str, torch.Size] = {}

    def note(prefix: str, module: torch.nn.Module, _: Any) -> None:
        for name, param in module.named_parameters(prefix, recurse=False):
            shapes[name] = (param.to_local() if isinstance(param, DTensor) else param).shape

    hooks = [part.register_forward_pre_hook(partial(note, name)) for name, part in model.named_modules()]
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()
