"""The training modes in the whole system: streaming gives the gradients of sync, async keeps its staleness bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes

SHORT = ("validation.every=0", "algorithm.steps=3")


def figures(line: dict[str, float]) -> list[float]:
    return [line["reward/mean"], line["train/loss"], line["train/grad_norm"]]


def test_streaming_gives_the_gradients_of_sync(tmp_path: Path) -> None:
    shared = (*SHORT, "trainer.dp=2", "loss.kl_coef=0.01")
    modes = {"sync": (), "async_streaming": ("algorithm.max_staleness=0",)}
    runs.run_each(tmp_path, {mode: [*shared, f"algorithm.mode={mode}", *more] for mode, more in modes.items()})
    found = {mode: runs.steps_of(tmp_path / mode) for mode in modes}
    for alone, *others in zip(*found.values(), strict=True):
        for chunked in others:
            assert figures(chunked) == pytest.approx(figures(alone), rel=1e-6, abs=1e-6)
            assert alone["staleness/max"] == chunked["staleness/max"] == 0


def test_minibatches_and_epochs_give_the_same_updates_on_every_mesh(tmp_path: Path) -> None:
    shared = (
        *SHORT, "algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.prev_logprobs=recompute",
        "loss.kl_coef=0.01", "loss.clip_low=0.01", "loss.clip_high=0.01", "trainer.lr=0.01",
    )  # fmt: skip
    runs.run_each(tmp_path, {"one": shared, "two": [*shared, "trainer.dp=2"]})
    one, two = runs.steps_of(tmp_path / "one"), runs.steps_of(tmp_path / "two")
    # One update is the same to 1e-6. Adam divides each gradient by its own size, so that what rounding makes of a
    # gradient of almost 0 is a whole step of that weight: later updates start from weights that differ by more.
    first = ("update_1/grad_norm", "update_1/reference_kl", "update_1/approx_kl", "update_1/clip_fraction")
    assert [two[0][key] for key in first] == pytest.approx([one[0][key] for key in first], rel=1e-6, abs=1e-6)
    for alone, together in zip(one, two, strict=True):
        assert figures(together) == pytest.approx(figures(alone), rel=1e-4, abs=1e-5)
        assert alone["train/updates"] == together["train/updates"] == 4
        assert alone["update_1/clip_fraction"] == 0 and alone["update_1/ratio_mean"] == 1
        assert alone["update_4/approx_kl"] > 0 and alone["train/clip_fraction"] > 0


@pytest.mark.parametrize(("staleness", "in_flight"), [(0, "keep"), pytest.param(2, "abort", marks=pytest.mark.slow)])
def test_async_stays_within_its_staleness(tmp_path: Path, staleness: int, in_flight: str) -> None:
    steps = runs.trained(
        tmp_path / "run", "validation.every=3", "algorithm.steps=6", "algorithm.mode=async",
        f"algorithm.max_staleness={staleness}", f"sync.in_flight={in_flight}",
    )  # fmt: skip
    seen = [step["staleness/max"] for step in steps]
    assert len(steps) == 6 and max(seen) <= staleness
    assert all(step["rollout/failed_rows"] == 0 for step in steps), "what is cut off goes on"
    if staleness:
        assert max(seen) > 0 and steps[0]["queue/groups_in_flight"] == 2 * 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deterministic_run_repeats_figure_by_figure(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        steps = runs.trained(
            tmp_path / name, *SHORT, "algorithm.mode=async", "run.deterministic=true", "sync.in_flight=keep",
            "rollout.num_engines=2", "algorithm.dynamic_sampling.enabled=true",
        )  # fmt: skip
        assert steps[-1]["staleness/max"] == 1
        found.append([figures(step) + [step["rollout/groups_dropped"]] for step in steps])
    assert found[0] == found[1]


@pytest.mark.slow  # background validation also runs in test_healing
def test_validation_in_the_background_ends_at_the_target_and_never_keeps_the_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    output = runs.finish(
        run_dir, "algorithm.mode=async", "algorithm.steps=50", "validation.every=2", "validation.background=true",
        "validation.stop_at=0.0", "run.keep_best=true",
    )  # fmt: skip
    lines = [line for line in runs.metrics(run_dir) if "val/exact_match" in line]
    assert [(line["step"], line["val/version"]) for line in lines] == [(0, 0)]
    best = json.loads((run_dir / "best.json").read_text())
    assert (best["metric"], best["step"]) == ("val/exact_match", 0) and not (run_dir / "best").exists()
    assert "best/: none, as no validation after the first had a higher val/exact_match" in output

    run_dir = tmp_path / "longer"
    runs.finish(
        run_dir, "algorithm.mode=streaming", "algorithm.steps=5", "validation.every=2", "validation.background=true"
    )
    lines = [line for line in runs.metrics(run_dir) if "val/exact_match" in line]
    assert [(line["step"], line["val/version"]) for line in lines] == [(0, 0), (3, 2), (5, 5)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recorded_run_is_trained_again_without_an_engine(tmp_path: Path) -> None:
    """Rollouts that overlap the training as timing has it; other loss, same groups."""
    options = (*SHORT, "algorithm.mode=async", "sync.in_flight=keep", "algorithm.dynamic_sampling.enabled=true")
    recorded = tmp_path / "recorded"
    first = runs.trained(recorded, *options, "run.record=true", "run.checkpoint_every=1")
    again = runs.trained(tmp_path / "replayed", *options, f"run.replay={recorded}", "trainer.dp=2")
    for was, now in zip(first, again, strict=True):
        assert figures(now) == pytest.approx(figures(was), rel=1e-4, abs=1e-5)
        assert now["staleness/mean"] == was["staleness/mean"]
        assert now["rollout/groups_dropped"] == was["rollout/groups_dropped"]
    code, output = runs.run(tmp_path / "other", *options, f"run.replay={recorded}", "run.seed=1")
    said = " ".join(output.replace("│", " ").split())  # the panel breaks lines where the path's length has it
    assert code == 1 and "holds no group of the prompt at position 0" in said, output
