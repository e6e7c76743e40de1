"""Tests the trackers with the packages of their services, whose files are read back; needs the extra `trackers`."""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false
# What a tracker brings is known only where it is installed.
import importlib
import json
import logging
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.trainers.config.tracker_options import TrackerConfig
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.trackers import build_tracker
from headrace.trainers.observe.tracking import Tracking

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.filterwarnings("default")]
"""Warnings of the packages are theirs."""
NEEDS = "needs the extra `trackers`"
CONFIG = {"run": {"name": "x"}, "trainer": {"lr": 0.5}}


def logged(folder: Path, kind: str, resumed: bool = False, **options: Any) -> None:
    """Log two steps and a sample with one tracker, as a run does."""
    tracker = build_tracker(TrackerConfig(kind=kind, options=options))  # pyright: ignore[reportArgumentType]
    writer = MetricsWriter(folder / "metrics.jsonl", Tracking({kind: tracker}, folder, CONFIG))
    first = 3 if resumed else 1
    writer.log(first, {"val/reward": 0.5, "val/reward/exact": 0.5, "reward/mean": 0.25 * first, "val/pass@4": 1.0})
    line = {"kind": "episode", "key": f"{first}.0", "prompt": "p", "turns": [{"text": "wrote"}], "reward": 0.5}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    writer.log(first + 1, {"reward/mean": 0.25 * (first + 1)})
    writer.close()


def records(path: Path) -> Iterator[Any]:
    """Read the records of an offline run of Weights & Biases: blocks of 32 KiB with records in up to several parts."""
    from wandb.proto import wandb_internal_pb2 as messages  # pyright: ignore[reportMissingImports]

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=NEEDS)
    logged(tmp_path, "wandb", mode="offline", project="mine")
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    found = list(records(file))
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], row["reward/mean"]) for row in history] == [(1, 0.25), (2, 0.5)]
    assert history[0]["val/pass@4"] == 1.0
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_id) == ("mine", json.loads((tmp_path / "trackers.json").read_text())["wandb"])
    [table] = (file.parent / "files" / "media" / "table").glob("*.table.json")
    content = json.loads(table.read_text())
    assert dict(zip(content["columns"], content["data"][0], strict=True))["response"] == "wrote"


def test_a_killed_helper_of_weights_and_biases_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb", reason=NEEDS)
    options = {"mode": "offline"}
    tracker = build_tracker(TrackerConfig(kind="wandb", options=options))
    tracking = Tracking({"wandb": tracker}, tmp_path, CONFIG)
    before = set(psutil.Process().children(recursive=True))
    while not (tmp_path / "trackers.json").exists():
        pass  # until the tracker has started; the test's time limit bounds it
    helpers = [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]
    assert helpers, before
    with caplog.at_level(logging.WARNING):
        os.kill(helpers[0].pid, signal.SIGKILL)
        helpers[0].wait(10)
        for step in range(5):
            tracking.log(step, {"reward/mean": 0.5})
        tracking.close()
    assert "tracker wandb: " in caplog.text
    hooks = importlib.import_module("wandb.sdk.lib.import_hooks")
    assert not hooks._post_import_hooks, "a hook would raise in the next import of torch"


def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason=NEEDS)
    # In a process of its own: trackio reads the folder of its databases when it is imported.
    code = "from pathlib import Path; import sys\n"
    code += "from headrace.tests.trainers.observe.test_trackers import logged\n"
    code += "logged(Path(sys.argv[1]), 'trackio', project='mine', dir=sys.argv[1] + '/db')\n"
    code += "logged(Path(sys.argv[1]), 'trackio', resumed=True, project='mine', dir=sys.argv[1] + '/db')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "db" / "mine.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logs = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    rewards = [(name, step, metrics["reward/mean"]) for name, step, metrics in logs if "reward/mean" in metrics]
    assert rewards == [(tmp_path.name, step, 0.25 * step) for step in (1, 2, 3, 4)]
    tables = [metrics["samples"] for _, _, metrics in logs if "samples" in metrics]
    assert len(tables) == 2 and "wrote" in json.dumps(tables[0])


def test_mlflow_in_a_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason=NEEDS)
    logged(tmp_path, "mlflow", experiment="mine")
    logged(tmp_path, "mlflow", resumed=True, experiment="mine")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    experiment = client.get_experiment_by_name("mine")
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(step, 0.25 * step) for step in (1, 2, 3, 4)]
    assert run.data.metrics["val/reward"] == run.data.metrics["val/reward.exact"] == 0.5
    assert run.data.metrics["val/pass_at_4"] == 1.0 and run.data.params["trainer.lr"] == "0.5"
    assert run.info.status == "FINISHED"
    [table] = (tmp_path / "mlruns").rglob("samples/step-000002.json")
    assert "wrote" in table.read_text()
