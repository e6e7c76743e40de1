"""Tests of `headrace bench gpu --work engine-routes`: its checks of routes, its summary, and the whole on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.engines.protocol import Completion
from headrace.bench.gpu.work_report import WorkReport
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tools.measure.engine_load import EngineOptions
from headrace.tools.measure.engine_routes import (
    TRUST_ROWS,
    RouteTally,
    first_samples,
    run_engine_routes,
    summarise_routes,
    trust_figures,
)
from headrace.trainers.errors import UserError
from headrace.trainers.run.checks.trust_probe import TrustReport

SPEC = RouteSpec(layers=(1, 2), top_k=2, num_experts=8, hidden_layers=3)
PROMPT, TOKENS = 3, 4


def completion(routes: np.ndarray | None, tokens: int = TOKENS) -> Completion:
    zeros = np.zeros(tokens)
    return Completion(zeros.astype(np.int32), zeros.astype(np.float32), "length", zeros.astype(np.int32), routes)


def some_routes() -> np.ndarray:
    """Routes of all tokens of a prompt and its sample but the last, the experts of which differ by token and layer."""
    first = np.arange((PROMPT + TOKENS - 1) * 2).reshape(-1, 2) % 8
    return np.stack([first, (first + 3) % 8], axis=2).astype(np.uint8)


def test_whole_routes_have_no_complaint() -> None:
    tally = RouteTally(SPEC)
    for number in range(3):
        tally.add(f"sample {number}", PROMPT, completion(some_routes()))
    assert tally.complaints() == []
    assert tally.wanted == 3 * (PROMPT + TOKENS - 1)
    assert tally.figures() == {"missing_share": 0.0, "bytes_per_token": 4.0, "experts_used_min": 8.0}


@pytest.mark.parametrize(
    ("missing", "count"), [("none at all", 6), ("marked", 2), ("cut", 1)], ids=lambda value: str(value)
)
def test_a_missing_route_is_counted(missing: str, count: int) -> None:
    routes = some_routes()
    if missing == "marked":
        routes[2:4] = SPEC.mark
    tally = RouteTally(SPEC)
    tally.add("whole", PROMPT, completion(some_routes()))
    tally.add("sample", PROMPT, completion({"none at all": None, "marked": routes, "cut": routes[:-1]}[missing]))
    assert tally.figures()["missing_share"] == count / 12
    assert tally.complaints() == [f"{count} of 12 routes are missing"]


@pytest.mark.parametrize("wrong", [(5, 5), (1, 8)], ids=["the same expert twice", "an id out of range"])
def test_a_route_that_no_router_chose_is_told(wrong: tuple[int, int]) -> None:
    routes = some_routes()
    routes[4, 1] = wrong
    tally = RouteTally(SPEC)
    tally.add("whole", PROMPT, completion(some_routes()))
    tally.add("round 1, prompt 0, sample 2", PROMPT, completion(routes))
    [told] = tally.complaints()
    assert told.startswith(
        f"round 1, prompt 0, sample 2: token 4, layer 2: experts {list(wrong)}, expected 2 different"
    )


def test_a_layer_that_recorded_nothing_is_told() -> None:
    routes = some_routes()
    routes[:, 1] = (0, 1)  # a buffer that was never written, but for the duplicates
    tally = RouteTally(SPEC)
    tally.add("sample", PROMPT, completion(routes))
    assert tally.complaints() == ["layer 2 sent all tokens to the same 2 experts, as if it had recorded nothing"]
    assert tally.figures()["experts_used_min"] == 2


def test_the_ratio_is_that_of_medians() -> None:
    summary = summarise_routes({"with": [9.0, 20.0, 38.0], "without": [10.0, 25.0, 20.0]}, 7)
    assert summary["with.tokens_per_s"] == 20.0 and summary["vs_without"] == 1.0
    assert summary["vs_without_pairs"] == 0.9
    assert (summary["vs_without_pairs_min"], summary["vs_without_pairs_max"]) == (0.8, 1.9)


def test_the_trainer_gets_a_sample_of_each_of_a_few_prompts() -> None:
    answers = [[completion(None, tokens=number + 1), completion(None)] for number in range(TRUST_ROWS + 2)]
    rows = first_samples([[number] * 3 for number in range(TRUST_ROWS + 2)], answers)
    assert [(ids.tolist(), len(one.token_ids)) for ids, one in rows] == [([n] * 3, n + 1) for n in range(TRUST_ROWS)]


def test_mismatch_is_named_by_replay() -> None:
    native = {"mismatch_kl": 0.1, "mismatch_mean": 0.2, "mismatch_max": 0.3, "ratio_error": 1.2}
    replayed = {name: value / 2 for name, value in native.items()}
    report = TrustReport("vllm", "fsdp", 64, native, replayed, {1: 0.5, 2: 1.0})
    found = trust_figures(report)
    assert (found["mismatch_kl_without_replay"], found["mismatch_kl_with_replay"]) == (0.1, 0.05)
    assert found["native_agreement"] == 0.75


def test_it_reads_the_sections_of_engine_and_trainer(tmp_path: Path) -> None:
    options = EngineOptions(tmp_path, "engine-routes-tiny", overrides=("algorithm.steps=2",))
    with pytest.raises(UserError, match=r"algorithm.steps=2: .*, expected keys of rollout.\* and trainer.\* only"):
        run_engine_routes(options, WorkReport(options.work, tmp_path))


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.vllm
@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    report = WorkReport("engine-routes-tiny", tmp_path / "out")
    run_engine_routes(EngineOptions(report.out, report.work, pairs=1), report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    figure = {name.removeprefix("gpu.engine-routes-tiny."): value for name, value in found.items()}
    assert figure["missing_share"] == 0 and figure["bytes_per_token"] == 2 * 2
    assert figure["vs_without"] > 0 and figure["tokens_at_most"] == 4 * 4 * 32
    assert 0 < figure["mismatch_kl_with_replay"] < 1e-4 and figure["native_agreement"] > 0.9
    noted = [json.loads(line) for line in (tmp_path / "out" / "notes.jsonl").read_text().splitlines()]
    assert len([line for line in noted if "tokens_per_s" in line]) == 4 and "mismatch_kl_without_replay" in noted[-1]
