"""The whole system through the command line: stores agree, ranks agree, the driver stays light, resume continues."""

import json

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes

FIGURES = ("reward/mean", "train/loss", "train/grad_norm", "rollout/response_length_mean", "policy/version")


@pytest.mark.timeout(900)
def test_stores_give_identical_metrics(tmp_path):
    kinds = ("local", "shm", "ray", "simple")
    runs.run_each(tmp_path, {kind: [*runs.store(kind), "algorithm.steps=2"] for kind in kinds})
    seen = {}
    for kind in kinds:
        run_dir = tmp_path / kind
        assert runs.metrics(run_dir)[-1]["event"] == "finished"
        seen[kind] = [[line[name] for name in FIGURES] for line in runs.steps_of(run_dir)]
        assert len(seen[kind]) == 2
    assert all(figures == seen["shm"] for figures in seen.values())


@pytest.mark.timeout(600)
def test_two_ranks_with_log_prob_passes_and_a_light_driver(tmp_path):
    run_dir = tmp_path / "run"
    lines = runs.trained(
        run_dir, "trainer.dp=2", "algorithm.steps=4", "algorithm.prev_logprobs=recompute", "loss.kl_coef=0.01",
        "dataplane.integrity=verify", "run.trace_step=3",
        "algorithm.prompts_per_step=16",  # 128 rows: plan, sync and reports cost the same few KB for any number
    )  # fmt: skip
    # In the first step a busy machine is asked every few seconds whether it goes on, and that counts, too.
    assert all(0 < line["driver/bytes_per_row"] < 100 for line in lines[1:])
    assert all(line["dataplane/bytes_put"] > 0 and line["dataplane/bytes_got"] > 0 for line in lines)
    assert [line["policy/version"] for line in lines] == [1, 2, 3, 4]
    assert abs(lines[0]["train/reference_kl"]) < 1e-5 and lines[-1]["train/reference_kl"] > 0
    names = {event["args"]["name"] for event in json.loads((run_dir / "trace.json").read_text())["traceEvents"]
             if event["ph"] == "M" and event["name"] == "process_name"}  # fmt: skip
    assert {"driver", "rollout 0", "train worker 0", "train worker 1"} <= names
    assert '"title":"Learning"' in (run_dir / "report.html").read_text()
