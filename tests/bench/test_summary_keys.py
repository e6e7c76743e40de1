"""The keys of each benchmark's summary.json are those that `summary_keys.json` lists: scripts of users read them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench import replica
from headrace.bench import steps as modes
from headrace.bench.gpu import whole_runs as gpu
from headrace.bench.gpu.nvml import GpuSamples
from headrace.bench.gpu.train_run import read_outcome
from headrace.bench.gpu.trl import TrlOutcome
from headrace.bench.gpu.works import parse_layout
from headrace.bench.hosts import directory_cost, reads
from headrace.bench.hosts.encryption import COSTS
from headrace.bench.hosts.reads import ReadOptions, ReadResult
from headrace.bench.hosts.recovery import RECOVERY
from headrace.bench.records import conditions
from headrace.bench.replica import WAYS, ReplicaResult
from headrace.bench.steps import CASES, ModeResult
from headrace.bench.train_steps import benchmark as train_steps
from headrace.bench.transfer import baselines
from headrace.bench.transfer import results as transfer_results
from headrace.bench.transfer.picture_rounds import OPS, picture_summary
from headrace.bench.transfer.pictures import QUEUE_KEYS, RAY, UNSHARED, VLM
from headrace.bench.transfer.results import CHECKSUMMED, IN_TURNS, PAIRED, Result, RouteSizes, StepResult
from headrace.bench.weights import benchmark as weights
from headrace.bench.weights import senders
from headrace.bench.weights.benchmark import WeightOptions, WeightResult
from headrace.bench.weights.senders import SenderOptions, SenderResult
from headrace.tests.bench.gpu.runs import record, task, write_run
from headrace.tests.bench.train_steps.test_benchmark import FIGURES

RECORDED = Path(__file__).with_name("summary_keys.json")


def transfer_keys() -> list[str]:
    stores, names = ("shm", "mooncake"), {name: baselines.contender_name(name) for name in baselines.NAMES}
    contenders = [*stores, "mooncake" + PAIRED, *names.values()]
    results = [
        Result(load, op, name, 1 << 20, (0.1, 0.2), wire_bytes=1 << 20)
        for load in ("rl-1024", "moe", "wide-32", "narrow-1") for op in ("put", "get2", "get8", "field", "clear")
        for name in contenders
    ]  # fmt: skip
    results += [
        Result("rl-1024", op, name, 1, (0.1,)) for op in IN_TURNS.values() for name in ("shm", "shm" + CHECKSUMMED)
    ]
    results += [
        Result("step-ends", op, way, 1, (0.1,))
        for op in ("from_padded", "to_padded")
        for way in (transfer_results.OWN_PADDING, transfer_results.MASKED_COPY)
    ]
    steps = [StepResult(name, (0.1,), (0.2,), 1.0, 2.0, 3.0, 4.0, 5.0) for name in ("shm", "transferqueue")]
    summary = transfer_results.summarise(results, steps, stores, names, (baselines.SECOND_RUN,))
    sizes = RouteSizes(10, 20, 30)
    routes = transfer_results.route_summary(results, {**summary, "moe.put.tcp.vs_tcp": 1.0}, sizes)
    pictures = [
        Result(VLM, op, name, 1, (0.1,), wire_bytes=1)
        for op in OPS
        for name in ("shm", "shm" + UNSHARED, RAY, QUEUE_KEYS)
    ]
    return [*summary, *routes, *picture_summary(pictures, stores)]


def replica_keys() -> list[str]:
    return [*replica.summarise([ReplicaResult(2, way, (0.1,), 1, 2, 3) for way in WAYS])]


def step_keys() -> list[str]:
    results = [ModeResult(case.name, (1.0, 2.0), 0.5, 0.0, 1.0, 0) for case in CASES]
    return [*modes.summarise(results, results)]


def weights_keys() -> list[str]:
    options = WeightOptions(Path("unused"), sizes=("0.1B",))
    results = [WeightResult(case, 1 << 20, (0.1,), (0.1,), "memcpy", 0.1, 1) for case in options.cases()]
    return [*weights.summarise(options, results)]


def sender_keys() -> list[str]:
    cases = (*senders.ONE_COPY, "one", *(f"many {need}" for need in senders.NEEDS))
    results = [SenderResult(case, (0.1,), 1.0, 1, 0.5) for case in cases]
    return [*senders.summarise(SenderOptions(Path("unused")), results)]


def hosts_keys() -> list[str]:
    places = [("same_host", reads.SHM), *[(f"other_host.{gbit}gbit", reads.RAW) for gbit in ReadOptions().links_gbit]]
    results = [
        ReadResult(place, spec.name, 1 << 20, (0.1,), baseline, (0.1,))
        for place, baseline in places
        for spec in ReadOptions().workloads
    ]
    directory = directory_cost.CostResult(100.0, {}, 1.0)
    return [*reads.summarise(results), *COSTS, RECOVERY, *directory_cost.summarise_cost([directory], [1000.0])]


def gpu_keys(folder: Path) -> list[str]:
    one = task(folder, parse_layout("colocated-1", 2))
    write_run(one.folder, [record(number, 2.0 * number, 1.0, **{"train/mfu": 0.4}) for number in (1, 2, 3)])
    samples = GpuSamples(["a"], [time.time()], [[0.5]], [[1.0]])
    outcome = replace(read_outcome(one, time.time() - 9, samples), idle_shares=[0.5])
    return [*gpu.summarise("grpo-0.6b", [outcome], [TrlOutcome((1.0, 2.0), (0.1, 0.1), 1.0, "")])]


def train_keys() -> list[str]:
    return [*train_steps.summarise("train-0.6b", [FIGURES])]


def test_the_keys_are_those_that_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.records._commit", lambda: "unknown")
    found = {
        "conditions": [*conditions()],
        "transfer": transfer_keys(),
        "replica": replica_keys(),
        "step": step_keys(),
        "weights": weights_keys(),
        "weights --senders 4": sender_keys(),
        "hosts": hosts_keys(),
        "gpu --work grpo-*": gpu_keys(tmp_path),
        "gpu --work train-*": train_keys(),
    }
    assert {name: sorted(keys) for name, keys in found.items()} == json.loads(RECORDED.read_text())
