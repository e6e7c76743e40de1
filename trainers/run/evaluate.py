"""Evaluates a model on the sets of a configuration, without a trainer, a Ray cluster or a run folder.

sets of the configuration -> one rollout actor in this process, with its engine -> metrics, as in a run
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ...actors.rollout.actor import RolloutActor, RolloutSetup
from ...actors.rollout.evaluation_metrics import FigureSums
from ...actors.rollout.results import EvaluationReport
from ...dataplane.config import DataPlaneConfig
from ...dataplane.factory import open_data_plane
from ...dataplane.handle import DataPlaneHandle
from ..cluster.rollout_specs import EvaluationDefaults, EvaluationPlan, evaluation_plans, rollout_setup
from ..config.config import Config
from ..errors import UserError
from ..fetch.gguf_folder import readable_model
from .checks.preflight import check_evaluation


@dataclass(frozen=True, slots=True)
class SetResult:
    """Result of one evaluation set."""

    name: str
    """Name of the set: `validation`, or the name of a section below `evaluation`."""
    model: str
    """Folder or hub id of the evaluated model."""
    source: str
    """Source of the prompts."""
    rows: int
    """Number of generated samples."""
    failed: int
    """Number of samples whose reward or episode failed."""
    first_error: str
    """Error of the first failed sample; "" when none failed."""
    sampling: dict[str, object]
    """Sampling parameters of the set."""
    metrics: dict[str, float]
    """Metrics of the set, under the same keys as in a run."""
    seconds: float
    """Seconds that the evaluation took."""


def evaluate_model(
    config: Config, model: str | None, names: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None
) -> list[SetResult]:
    """Evaluate a model on evaluation sets of `config`, one set after another.

    model: folder, hub id or GGUF file of the model; None stands for `model.path`. names: names of the sets; () stands
    for all of them. tell: callback that receives progress messages. Raises UserError if there is no such set, or if the
    model or the prompts of a set cannot be used.
    """
    sets = {name: one.model_copy(update={"every": 1}) for name, one in config.evaluation.items()}
    path = config.model.model_copy(update={} if model is None else {"path": readable_model(model, tell)})
    # The context length of the engine counts only sets with `every` above 0, so every set gets 1 here.
    held_out = config.validation.model_copy(update={"every": 1}) if config.data.has_held_out else None
    changes = {"model": path, "evaluation": sets, "validation": held_out or config.validation}
    config = config.model_copy(update=changes)
    if config.model.builtin:
        raise UserError(
            f"--model: got {config.model.path!r}, expected a model folder or hub id, because each run makes the "
            "built-in model again; its folder has it as base_model, best and model"
        )
    training = EvaluationDefaults(config.rollout, config.data, config.reward, config.run.seed)
    plans = _chosen(evaluation_plans(training, held_out, config.evaluation, idle=True), names)
    check_evaluation(config)
    setup_of = partial(rollout_setup, config, 0, config.model.path)
    return asyncio.run(_evaluate(setup_of, config.model.path, config.dataplane, plans, tell))


def _chosen(plans: Sequence[EvaluationPlan], names: Sequence[str]) -> list[EvaluationPlan]:
    known = {short_name(plan): plan for plan in plans}
    if not known:
        raise UserError("evaluation: got no sets, expected at least one, or held-out prompts in `data.validation`")
    for name in names:
        if name not in known:
            raise UserError(f"--set: got {name!r}, expected some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def short_name(plan: EvaluationPlan) -> str:
    """Return the short name of a set, as users write it. It is `validation`, or the name of its section below
    `evaluation`."""
    return plan.name.removeprefix("evaluation.")


async def _evaluate(
    setup_of: Callable[[DataPlaneHandle, str], RolloutSetup],
    model: str,
    dataplane: DataPlaneConfig,
    plans: Sequence[EvaluationPlan],
    tell: Callable[[str], None],
) -> list[SetResult]:
    """Evaluate `model` according to `plans`. setup_of: function from the handle of a data plane and a device to the
    settings of a rollout actor with an embedded engine."""
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    local = DataPlaneConfig.model_validate({**dataplane.model_dump(), "store": {"kind": "local"}})
    with open_data_plane(local, in_process=True) as plane:
        setup = setup_of(plane.handle, device)
        evaluations = tuple(plan.setup for plan in plans)
        actor = RolloutActor(replace(setup, evaluations=evaluations, journal=None))
        results = []
        try:
            tell("loading the model")
            await actor.build()
            for note in actor.data_notes():
                tell(f"note: {note}")
            for plan in plans:
                tell(f"evaluating {short_name(plan)}")
                started = time.perf_counter()
                report = await actor.worker.evaluate(plan.name, 0, 1, plan.sampling, 0)
                results.append(_result(model, plan, report, time.perf_counter() - started))
        except ValueError as error:  # The model or the prompts cannot be used.
            raise UserError(str(error)) from error
        finally:
            await actor.close()
    return results


def _result(model: str, plan: EvaluationPlan, report: EvaluationReport, seconds: float) -> SetResult:
    sums = FigureSums()
    for key, total in report.sums.items():
        sums.add(key, total, report.counts[key])
    source, sampled = plan.setup.data.source(validation=True), asdict(plan.sampling)
    del sampled["pictures"]  # Each request has its own.
    return SetResult(
        short_name(plan), model, source, report.rows, report.failed, report.first_error,
        sampled, sums.means(), seconds,
    )  # fmt: skip


def write_results(results: Sequence[SetResult], path: Path) -> None:
    """Write the results to `path` as a JSON list with one object for each set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
