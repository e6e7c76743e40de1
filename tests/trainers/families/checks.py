"""Checks of one family of models: each compares the trainer or the engine with plain transformers, or with itself.

A check returns its figure, the largest error that it found. It raises `Wrong` where there is no figure, and ValueError
where Headrace or a library refuses the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import AutoConfig

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Generator, SamplingParams
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.trainers.backends.backend_ranks import Row, backend_config, logprobs_of, micro_batch, weights_of
from headrace.tests.trainers.backends.experts.routed_rows import random_routes, routed
from headrace.tests.trainers.families.plain import (
    LEAST_SPREAD,
    PlainModel,
    relative_error,
    row_of,
    rows_of,
    trained,
)
from headrace.tests.trainers.families.tiny_models import CONTEXT, LENGTHS, VOCAB, WITH_EXPERTS
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

LOGPROBS, GRADIENT, MESH_GRADIENT = 1e-5, 1e-6, 1e-4
"""Largest errors: of a log-prob, absolute; of the whole gradient on one rank and on two, relative."""
LEAST_CHANGE = 1e-3
"""Smallest difference of a log-prob that an update or other experts must make."""

State = Literal["passed", "rounding", "wrong", "refused", "crashed"]
"""Result of a check. `rounding`: the figure is too large, but transformers' own float32 is as far from its float64."""


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    state: State
    figure: float | None = None
    """Largest error that the check found; None for a check without one."""
    why: str = ""
    """Reason of a state other than `passed`, in the words of the library that gave it."""

    @property
    def holds(self) -> bool:
        """True if the family does what the check asks for."""
        return self.state in ("passed", "rounding")


class Wrong(Exception):
    """A result that is not what it must be."""


def outcome_of(check: Callable[[], float | Outcome], bar: float) -> Outcome:
    """Run a check. bar: its largest allowed figure."""
    try:
        found = check()
    except ValueError as error:
        return Outcome("refused", why=first_sentence(error))
    except Wrong as error:
        return Outcome("wrong", why=str(error))
    except Exception as error:
        return Outcome("crashed", why=f"{type(error).__name__}: {first_sentence(error)}")
    if isinstance(found, Outcome):
        return found
    return Outcome("passed", found) if found <= bar else Outcome("wrong", found, f"{found:.0e}, above {bar:.0e}")


def first_sentence(error: BaseException | str) -> str:
    """Return the first sentence of the first line of an error's message."""
    line = next(iter(str(error).strip().splitlines()), "")
    return re.split(r"(?<=\.) (?=[A-Z])", line)[0]


def settings(folder: str, **changes: Any) -> Any:
    """Return the config of a trainer with defaults in all keys that the checks do not need."""
    keys: dict[str, Any] = {
        "loss": LossConfig(kind="reinforce"), "prev": "rollout", "with_reference": False, "context": CONTEXT,
        "lr": 1e-3, "grad_clip": None, "warmup_steps": 0, "weight_decay": 0.0,
    }  # fmt: skip
    return backend_config(folder, **{**keys, **changes})


def quiet() -> None:
    """Silence what transformers prints while it loads models."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def step(backend: FsdpBackend, micros: Sequence[MicroBatch]) -> dict[str, float]:
    """Run one train step, and return its metrics. Collective."""
    backend.begin_step(1.0)
    backend.accumulate(micros, len(micros))
    metrics = backend.finish_step()
    if metrics["train/skipped"]:
        raise Wrong("the step was skipped")
    return metrics


def gradients_of_step(backend: FsdpBackend, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return the whole gradient of a step on rank 0, by HF name, and {} elsewhere. Collective.

    Before the optimizer's step each weight takes the value of its gradient, so that the stream of weights, which puts
    the pieces of all ranks together on any mesh, carries the gradient. Then the weights get their values back.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def swap(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            kept.append((param, param.detach().clone()))
            param.zero_() if param.grad is None else param.copy_(param.grad)
            param.grad = None

    hook = backend._optimizer.parts[0].register_step_pre_hook(swap)
    try:
        step(backend, micros)
        names = {name for name, param in backend._policy.model.named_parameters() if param.requires_grad}
        return {name: value for name, value in weights_of(backend).items() if name in names}
    finally:
        hook.remove()
        with torch.no_grad():
            for param, value in kept:
                param.copy_(value)


class OneRank:
    """A model and its rows, with what transformers computes for them. The trainers that it builds have one rank."""

    def __init__(self, folder: str, name: str) -> None:
        """Load the plain model. Raises RuntimeError if its log-probs spread too little."""
        self.folder, self.name = folder, name
        self.rows = rows_of(name)
        self.plain = PlainModel(folder)
        with torch.no_grad():
            self.expected = self.plain.logprobs(self.rows)
        spread = float(trained(self.expected, self.rows).std())
        if not spread > LEAST_SPREAD:
            raise RuntimeError(f"{name}: the log-probs spread by {spread:.2f}, expected more than {LEAST_SPREAD}")

    def build(self, **changes: Any) -> FsdpBackend:
        """Return a trainer of the model, with padded rows unless `changes` say otherwise."""
        return FsdpBackend(settings(self.folder, **{"packing": "none", **changes}), 0, 1)

    @functools.cached_property
    def gradient(self) -> dict[str, torch.Tensor]:
        """Gradient of `rows` by transformers."""
        return self.plain.gradients(self.rows)

    def micros(self) -> list[MicroBatch]:
        """Return the rows as two microbatches."""
        return [micro_batch(self.rows[:3]), micro_batch(self.rows[3:])]


def check_logprobs(backend: FsdpBackend, case: OneRank) -> float | Outcome:
    """Return the largest error of a trained token's log-prob."""
    found = logprobs_of(backend, micro_batch(case.rows))
    error = float((found - trained_only(case.expected, case.rows)).abs().max())
    if error <= LOGPROBS:
        return error
    with torch.no_grad():
        other = trained_only(PlainModel(case.folder, attention=None).logprobs(case.rows), case.rows)
    why = f"{error:.0e}; against the attention that transformers chooses {(found - other).abs().max():.0e}"
    return Outcome("wrong", error, why)


def trained_only(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return the log-probs of all tokens with 0 at tokens that are not trained."""
    return logprobs * torch.from_numpy(np.concatenate([row.mask for row in rows]))


def check_gradient(backend: FsdpBackend, case: OneRank) -> float | Outcome:
    """Return the relative error of the whole gradient of a step of two microbatches."""
    found = gradients_of_step(backend, case.micros())
    error = relative_error(found, case.gradient)
    if error <= GRADIENT:
        return error
    exact = PlainModel(case.folder, torch.float64).gradients(case.rows)
    ours, theirs = relative_error(found, exact), relative_error(case.gradient, exact)
    why = f"{error:.0e}; against float64 {ours:.0e}, transformers in float32 {theirs:.0e}"
    return Outcome("rounding" if ours <= 2 * theirs else "wrong", error, why)


def check_step(backend: FsdpBackend, case: OneRank) -> float:
    """Return 0 after two steps that moved the log-probs."""
    before = logprobs_of(backend, micro_batch(case.rows))
    for _ in range(2):
        step(backend, case.micros())
    moved = float((logprobs_of(backend, micro_batch(case.rows)) - before).abs().max())
    if not LEAST_CHANGE < moved < float("inf"):
        raise Wrong(f"two steps moved the log-probs by {moved:.0e}")
    return 0.0


def without_dtypes(content: Any) -> Any:
    """Return a config without the dtypes of it and its sections, which those of the exported weights are."""
    if not isinstance(content, dict):
        return content
    return {key: without_dtypes(value) for key, value in content.items() if key != "dtype"}


def check_export(backend: FsdpBackend, case: OneRank) -> float:
    """Return the largest error of a log-prob of the exported model, as transformers loads it. Its weights must be equal
    to those of the trainer, and its config to that of the folder."""
    folder = Path(case.folder, "exported")
    backend.export_model(str(folder))
    plain = PlainModel(str(folder))
    weights, named = weights_of(backend), dict(plain.model.named_parameters())
    differing = [name for name, value in named.items() if name in weights and not torch.equal(weights[name], value)]
    if differing or not named.keys() & weights.keys():
        raise Wrong(f"exported weights differ: {', '.join(differing[:3])}")
    old, new = (without_dtypes(json.loads((path / "config.json").read_text())) for path in (Path(case.folder), folder))
    text = old.get("text_config", {})
    if text.get("model_type") == new["model_type"]:  # Only the text part was loaded, and it is a model of its own.
        old = {**text, "architectures": new["architectures"]}
    keys = [key for key in sorted({*old, *new} - {"transformers_version"}) if old.get(key) != new.get(key)]
    if keys:
        raise Wrong(f"keys of the exported config differ: {', '.join(keys)}")
    with torch.no_grad():
        expected = trained_only(plain.logprobs(case.rows), case.rows)
    return float((logprobs_of(backend, micro_batch(case.rows)) - expected).abs().max())


def check_resume(backend: FsdpBackend, case: OneRank) -> float:
    """Return the largest difference between weights one step after a checkpoint, with and without a resume."""
    path = f"{case.folder}/checkpoint"
    backend.save(path)
    with contextlib.closing(case.build()) as resumed:
        resumed.load(path)
        for one in (backend, resumed):
            step(one, case.micros())
        expected, found = weights_of(backend), weights_of(resumed)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def check_engine(backend: FsdpBackend | None, case: OneRank) -> float | Outcome:
    """Return the largest error of a log-prob that the engine `hf` reports for its own samples.

    With the weights of the folder it is compared with transformers, where rows need not have CONTEXT tokens; then,
    with the weights of the trainer, if there is one, with the trainer.
    """
    error = 0.0
    with engine_of(case) as (engine, sampled):
        if case.name not in LENGTHS:
            rows, logprobs, _ = sampled()
            with torch.no_grad():
                error = float((trained(case.plain.logprobs(rows), rows) - logprobs).abs().max())
            if error > LOGPROBS:
                return against_a_cache(case, rows, error)
        if backend is None:
            return error
        engine._parameters.copy(engine._parameters.match(weights_of(backend)))
        rows, logprobs, _ = sampled()
        found = trained(logprobs_of(backend, micro_batch(rows)), rows)
    return max(error, float((found - logprobs).abs().max()))


@torch.no_grad()
def against_a_cache(case: OneRank, rows: list[Row], error: float) -> float | Outcome:
    """Return `error`, or the outcome of a comparison of transformers with itself, if it is large.

    error: a difference of log-probs between decoding and a whole pass.
    """
    if error <= LOGPROBS:
        return error
    whole, cached = (trained(case.plain.logprobs(rows, cached=one), rows) for one in (False, True))
    theirs = float((whole - cached).abs().max())
    why = f"{error:.0e}; transformers with and without a cache differ by {theirs:.0e}"
    return Outcome("rounding" if error <= 2 * theirs else "wrong", error, why)


def check_replay(case: OneRank) -> float | Outcome:
    """Return the largest error of a log-prob that the trainer computes with the engine's routes. The trainer's own
    routers must agree with all of them, and other routes must give other log-probs."""
    trainer = case.build(router_replay=RouterReplayConfig(enabled=True, native_agreement_every=1))
    spec = RouteSpec.of(AutoConfig.from_pretrained(case.folder).get_text_config())
    assert spec is not None, "the trainer refuses models without experts"
    with engine_of(case, routes=spec) as (_, sampled):
        rows, logprobs, routes = sampled()
    micro = routed(rows, [np.concatenate([one, spec.missing(1)]) for one in routes], spec)
    found = trained(logprobs_of(trainer, micro), rows)
    others = logprobs_of(trainer, routed(rows, random_routes(rows, spec), spec))
    if not (trained(others, rows) - found).abs().max() > LEAST_CHANGE:
        raise Wrong("other routes change no log-prob")
    if (agreement := step(trainer, [micro])["routes/native_agreement"]) < 1:
        raise Wrong(f"the trainer's routers agree with {agreement:.3f} of the engine's routes")
    return against_a_cache(case, rows, float((found - logprobs).abs().max()))


Samples = tuple[list[Row], torch.Tensor, list[Any]]
"""Rows of an engine's samples, the log-probs of their trained tokens (float32 `[T]`), and their routes or None."""


@contextlib.contextmanager
def engine_of(case: OneRank, **options: Any) -> Iterator[tuple[HfEngine, Callable[[], Samples]]]:
    """Context manager that provides an engine and a function that samples from it. The engine is then closed."""
    engine = HfEngine(case.folder, max_model_len=CONTEXT, seed=3, **options)
    with asyncio.Runner() as runner:
        try:
            context = getattr(case.plain.model.config.get_text_config(), "max_position_embeddings", CONTEXT)
            yield engine, lambda: runner.run(samples_of(engine, min(context, CONTEXT)))
        finally:
            runner.run(engine.close())


async def samples_of(engine: Generator, longest: int) -> Samples:
    """Sample four answers to each of three prompts of different lengths, which are decoded in one batch.

    longest: number of tokens that no row exceeds. Raises `Wrong` if the log-probs spread too little for a comparison.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, length) for length in (2, longest // 4, longest // 2)]
    params = SamplingParams(n=4, max_new_tokens=longest // 2)
    requests = [engine.generate(f"{number}", prompt.tolist(), params) for number, prompt in enumerate(prompts)]
    found = [
        (row_of(np.concatenate([prompt, one.token_ids]), len(prompt), 1.0, number), one)
        for number, (prompt, answers) in enumerate(zip(prompts, await asyncio.gather(*requests), strict=True))
        for one in answers
    ]
    rows, answers = [row for row, _ in found], [one for _, one in found]
    logprobs = torch.from_numpy(np.concatenate([one.logprobs for one in answers]))
    if not (spread := float(logprobs.std())) > LEAST_SPREAD:
        raise Wrong(f"the sampled log-probs spread by {spread:.2f}, expected more than {LEAST_SPREAD}")
    return rows, logprobs, [one.routes for one in answers]


def built(build: Callable[[], FsdpBackend]) -> FsdpBackend | Outcome:
    """Return a trainer, or the reason why there is none."""
    made: list[FsdpBackend] = []
    outcome = outcome_of(lambda: made.append(build()) or 0.0, 0.0)
    return made[0] if made else outcome


def run_checks(folder: str, name: str) -> dict[str, Outcome]:
    """Run all checks of the model `name` on one rank. Log-probs and gradient of its rows are written to `one_rank.pt`
    in `folder`, for the comparison with several ranks."""
    quiet()
    case = OneRank(folder, name)
    padded, packed = built(case.build), built(lambda: case.build(packing="packed"))

    def run(check: Callable[[FsdpBackend, OneRank], float | Outcome], bar: float, trainer: Any = padded) -> Outcome:
        if isinstance(trainer, Outcome):
            return trainer
        outcome = outcome_of(lambda: check(trainer, case), bar)
        trainer.abort_step()  # A check that failed can have left it open.
        return outcome

    found = {"padded": run(check_logprobs, LOGPROBS), "gradient": run(check_gradient, GRADIENT)}
    if found["gradient"].figure is not None and isinstance(padded, FsdpBackend):
        values = {"logprobs": logprobs_of(padded, micro_batch(case.rows))}
        torch.save({**values, "gradient": gradients_of_step(padded, case.micros())}, f"{folder}/one_rank.pt")
    found["packed"] = run(check_logprobs, LOGPROBS, packed)
    found["packed gradient"] = run(check_gradient, GRADIENT, packed)
    found |= {"step": run(check_step, 0.0), "export": run(check_export, LOGPROBS), "resume": run(check_resume, 0.0)}
    trainer = padded if isinstance(padded, FsdpBackend) else None
    found["engine"] = outcome_of(lambda: check_engine(trainer, case), LOGPROBS)
    if name in WITH_EXPERTS:
        found["replay"] = outcome_of(lambda: check_replay(case), LOGPROBS)
    return found
