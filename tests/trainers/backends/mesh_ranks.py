"""Provides microbatches for each rank of a mesh, and runs over a mesh, to the tests of the train backends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.actors.train.step_rows import stage_batch, stage_fields
from headrace.actors.train.topology import Place, Topology
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.tokens.packed_rows import slice_batch
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.trainers.backends.backend_ranks import (
    MEASURED,
    TEMPERATURE,
    TINY,
    ReferenceTrainer,
    Row,
    backend_config,
    micro_batch,
    poisoned_row,
    random_rows,
    recomputed_mismatch,
    weights_of,
)
from headrace.tests.trainers.backends.live_bytes import gathering_share
from headrace.trainers.backends.factory import build_backend

STEPS = 3
NUM_ROWS = 10


FLAGS: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "padded": {"packing": "none"},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "half": {"mixed_precision": True},
    "whole": {"distributed_optimizer": False},
    "packed": {"packing": "packed"},
    "offload": {"offload": True},
    "kept": {"reshard_after_forward": False},
    "full-head": {"head": "full"},
    "muon": {"optimizer": "muon"},
    "hosted": {"offload_optimizer": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend on one mesh."""

    name: str
    """The backend, one of the test's model folders, sizes of the mesh and FLAGS, as "megatron moe tp2 ep2 sp"."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other differences in the config."""

    @property
    def backend(self) -> str:
        return self.name.split()[0]

    @property
    def model(self) -> str:
        return self.name.split()[1]

    @property
    def topology(self) -> Topology:
        sizes = {word[:2]: int(word[2:]) for word in self.name.split()[2:] if word not in FLAGS}
        return Topology(**{"dp": 1, **sizes})

    def build(self, rank: int, folder: Path | str) -> Any:
        """Build this rank's backend."""
        settings = {"packing": "packed"} if self.backend == "megatron" else {}
        settings |= {"backend": self.backend, "topology": self.topology, **self.changes}
        for word in self.name.split()[2:]:
            settings |= FLAGS.get(word, {})
        return build_backend(backend_config(f"{folder}/{self.model}", **settings), rank, self.topology.world)


def cases(backend: str, changes: dict[str, Any] | None = None, /, **meshes: str) -> tuple[Case, ...]:
    """Return the cases of a backend. meshes: for each model the sizes and flags of its cases, separated by commas."""
    return tuple(
        Case(f"{backend} {model} {mesh}".strip(), changes or {})
        for model, listed in meshes.items()
        for mesh in listed.split(", ")
    )


def save_plain_llama(folder: Path) -> str:
    """Write a random 2-layer Llama without biases as a HF folder, its positions scaled as those of Llama 3."""
    torch.manual_seed(4)
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False, rope_parameters=scaled)).save_pretrained(folder)
    return str(folder)


def piece(micro: MicroBatch, topology: Topology, place: Place, spec: RouteSpec | None = None) -> MicroBatch:
    """Return what the rank at `place` receives of a microbatch: its pieces of the rows, its stage's columns and layers.
    spec: shape of the routes, if there are any."""
    batch = micro.batch
    if topology.cp > 1:
        batch = slice_batch(batch, micro.lengths, topology.pad_multiple, topology.cp, place.cp)
    batch = batch.subset(stage_fields(topology, place, tuple(batch), spec))
    return dataclasses.replace(micro, batch=stage_batch(batch, topology, place, spec))


def sent(rows: Sequence[Row], topology: Topology, place: Place, step_rows: Sequence[Row] = ()) -> MicroBatch:
    """Return what the rank at `place` receives of `rows`, some of `step_rows`."""
    tokens = [sum(int(other.mask.sum()) for other in step_rows if other.group == row.group) for row in rows]
    return dataclasses.replace(piece(micro_batch(rows), topology, place), group_tokens=np.array(tokens, np.int64))


def shares(rows: Sequence[Row], num: int) -> list[list[list[Row]]]:
    """Return three microbatches of different sizes for each of `num` replicas. The second one of the first replica is
    empty."""
    parts = [[list(rows[replica::num][micro::2]) for micro in (0, 1)] for replica in range(num)]
    return [[first, [], second] if not index else [first, second[:1], second[1:]]
            for index, (first, second) in enumerate(parts)]  # fmt: skip


def train(backend: Any, topology: Topology, rank: int, rows: Sequence[Row]) -> dict[str, float]:
    """Run one step in two calls of accumulate, of one and of two microbatches."""
    accumulate(backend, topology, rank, rows)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


def accumulate(backend: Any, topology: Topology, rank: int, rows: Sequence[Row]) -> None:
    """Open a step and accumulate its microbatches as `train` does, without finishing it."""
    place = topology.place(rank)
    micros = [sent(part, topology, place, rows) for part in shares(rows, topology.dp)[place.dp]]
    backend.begin_step(TEMPERATURE)
    backend.accumulate(micros[:1], 1)
    backend.accumulate(iter(micros[1:]), 2)


def logprobs(backend: Any, topology: Topology, rank: int, **options: Any) -> list[torch.Tensor]:
    """Return the log-probs of two microbatches that are the same on every replica."""
    rows = random_rows(50, NUM_ROWS)
    micros = [sent(part, topology, topology.place(rank)) for part in (rows[:6], rows[6:])]
    return backend.logprobs(micros, 2, temperature=TEMPERATURE, **options)


def run_cases(rank: int, world: int, cases: Sequence[Case], folder: str) -> dict[str, dict[str, Any]]:
    """Return steps, log-probs and weights of all cases, run one after the other in the same processes."""
    return {case.name: run_case(rank, case, folder) for case in cases if case.topology.world == world}


def run_case(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Return the steps, log-probs and weights of one case on one rank."""
    with contextlib.closing(case.build(rank, folder)) as backend:
        result: dict[str, Any] = {"weights before": weights_of(backend)}
        result["logprobs before"] = logprobs(backend, case.topology, rank)
        result["steps"] = [train(backend, case.topology, rank, random_rows(step, NUM_ROWS)) for step in range(STEPS)]
        result["logprobs"] = logprobs(backend, case.topology, rank)
        result["reference"] = logprobs(backend, case.topology, rank, reference=True)
        result["weights"] = weights_of(backend)
        result["share"] = gathering_share(backend, backend._policy)
        return result


def interrupted(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Run steps that must not be applied, then a whole step."""
    rows = random_rows(0, NUM_ROWS)
    with contextlib.closing(case.build(rank, folder)) as backend:
        before = weights_of(backend)
        found: dict[str, Any] = {}
        found["nothing"] = train(backend, case.topology, rank, [row for row in rows if not row.mask.any()])
        found["poisoned"] = train(backend, case.topology, rank, [*rows, poisoned_row()])
        accumulate(backend, case.topology, rank, random_rows(5, NUM_ROWS))
        backend.abort_step()
        found["unchanged"] = all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
        return {**found, "whole": train(backend, case.topology, rank, rows)}


def assert_interrupted(found: dict[str, Any], whole: tuple[float, float]) -> None:
    """Check a result of `interrupted`. whole: loss and gradient norm of the whole step."""
    assert found["nothing"]["train/skipped"] == found["poisoned"]["train/skipped"] == 1
    assert found["nothing"]["train/tokens"] == 0 < found["poisoned"]["train/tokens"]
    assert found["unchanged"] and np.isnan(found["poisoned"]["train/grad_norm"])
    assert [found["whole"][name] for name in ("train/loss", "train/grad_norm")] == pytest.approx(whole, rel=1e-5)
    assert found["whole"]["train/lr"] == 1e-3, "skipped steps do not move the schedule"


def resumed(
    rank: int, folder: str, chosen: Sequence[Case], saved_by: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Run two steps, a save and a third step on some meshes; load and run the third step on all of them. saved_by: for
    each model the checkpoints' names, those of cases, or of what another process has saved."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for case in chosen:
        if case.name in saved_by[case.model]:
            with contextlib.closing(case.build(rank, folder)) as backend:
                for step in (0, 1):
                    train(backend, case.topology, rank, random_rows(step, NUM_ROWS))
                backend.save(f"{folder}/{case.name}", wait=case.model == "tied" and case.topology.tp == 2)
                found[case.name]["third"] = train(backend, case.topology, rank, random_rows(2, NUM_ROWS))
                backend.wait_saved()
    for case in chosen:
        for saved in saved_by[case.model]:
            with contextlib.closing(case.build(rank, folder)) as backend:
                backend.load(f"{folder}/{saved}")
                found[saved][case.name] = train(backend, case.topology, rank, random_rows(2, NUM_ROWS))
    return dict(found)


def run_reference(folder: str) -> dict[str, Any]:
    """Compute the same results by hand with `ReferenceTrainer`."""
    trainer = ReferenceTrainer(folder)

    def of_rows() -> torch.Tensor:
        with torch.no_grad():
            rows = random_rows(50, NUM_ROWS)
            return torch.cat([trainer.row_logprobs(row) * torch.from_numpy(row.mask) for row in rows])

    def weights() -> dict[str, torch.Tensor]:
        kept = trainer.model.state_dict()
        biases = ((name, value) for name, value in trainer.model.named_buffers() if name in kept)
        every = (*trainer.model.named_parameters(), *biases)
        return {name: value.detach().clone() for name, value in every}

    result: dict[str, Any] = {"weights before": weights(), "logprobs before": of_rows()}
    result["steps"] = [trainer.step(random_rows(step, NUM_ROWS)) for step in range(STEPS)]
    return {**result, "logprobs": of_rows(), "weights": weights()}


def assert_as_reference(
    case: Case, ranks: Sequence[dict[str, Any]], expected: dict[str, Any], *, spread: bool = False
) -> None:
    """Compare `ranks`, the results of `run_case` on each rank, with those computed by hand.

    spread: true for a model whose log-probs differ by nats, in whose later steps the rounding of the first one shows.
    """
    for rank in ranks:
        figures = [(step["train/loss"], step["train/grad_norm"]) for step in rank["steps"]]
        assert np.array(figures) == pytest.approx(np.array(expected["steps"]), rel=1e-4 if spread else 1e-5, abs=1e-7)
        assert rank["steps"] == ranks[0]["steps"]
        for step, metrics in enumerate(rank["steps"]):
            wanted = recomputed_mismatch(random_rows(step, NUM_ROWS))
            assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    writers = {case.topology.writer(dp) for dp in range(case.topology.dp)}
    for number, rank in enumerate(ranks):
        if number not in writers:
            assert rank["logprobs"] == rank["reference"] == []
            continue
        for name in ("logprobs before", "reference", "logprobs"):
            wanted = "logprobs before" if name == "reference" else name
            atol = 1e-4 if spread and name == "logprobs" else 1e-5
            torch.testing.assert_close(torch.cat(rank[name]), expected[wanted], rtol=0, atol=atol)
    for name, tensor in expected["weights before"].items():
        assert torch.equal(ranks[0]["weights before"][name], tensor), name
        atol = 2e-6 if case.backend == "fsdp" else 4e-5 if spread else 1e-5
        torch.testing.assert_close(ranks[0]["weights"][name], expected["weights"][name], rtol=0, atol=atol)
    assert list(ranks[0]["weights"]) == list(expected["weights"])
    assert not any(rank["weights"] for rank in ranks[1:])
    # Two weights that are put together, and what the rank makes of its own: half of one, or two that it has alone.
    most = 2.1 if case.backend == "fsdp" else 3.01 if case.topology.pp > 1 else 2.51
    assert max(rank["share"] for rank in ranks) <= most, "memory of a pass"
