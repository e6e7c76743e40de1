"""Tests the files, the summary and the verification of the transfer benchmark, in a small run with threads."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from headrace.bench.transfer.benchmark import TransferOptions, TransferReport, run_transfer
from headrace.bench.transfer.report import failures, tables, write_report
from headrace.bench.transfer.stores import StoreEndpoint
from headrace.trainers.errors import UserError

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_ray")]

SHARE = 1 / 32


def options(out: Path, **more: object) -> TransferOptions:
    base = TransferOptions(out=out, stores=("local", "shm"), workloads=("rl-256",), quick=True, in_process=True)
    return dataclasses.replace(base, share=SHARE, **more)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransferReport, TransferOptions]:
    """Run everything that needs no Ray once, with few rows."""
    chosen = options(tmp_path_factory.mktemp("bench"), workloads=("rl-256", "tiny", "wide-32", "narrow-1"))
    return run_transfer(chosen, lambda line: None), chosen


def test_summary_is_flat_and_its_figures_are_numbers(small: tuple[TransferReport, TransferOptions]):
    summary = json.loads((small[1].out / "summary.json").read_text())
    conditions = summary.pop("conditions")
    assert {"cores", "memory_gib", "versions", "commit", "date", "repeats", "load_average"} <= set(conditions)
    assert {"rl-256.put.shm.vs_memcpy", "tiny.get8.local.vs_zmq", "step.shm.directory_calls"} <= set(summary)
    assert {"wide_vs_narrow.get.shm", "checksum_cost.local", "step-ends.to_padded.vs_masked_copy"} <= set(summary)
    assert all(math.isfinite(value) and value > 0 for value in summary.values())


def test_every_case_has_figures_and_says_what_was_absent(small: tuple[TransferReport, TransferOptions]):
    report, _ = small
    assert failures(report) == []
    assert set(report.absent) == {"transferqueue", "transferqueue_mooncake", "ray put"}
    ops = {result.op for result in report.results if result.contender == "shm"}
    assert ops == {"put", "get", "get8", "field", "write_back", "clear", "claim", "put, in turns", "get, in turns"}
    assert all(result.p99_s >= result.median_s > 0 for result in report.results if result.op != "claim")


def test_step_moves_what_it_says(small: tuple[TransferReport, TransferOptions]):
    for step in small[0].steps:
        assert step.bytes_put_per_token == 21
        assert 21 < step.wire_bytes_put_per_token < 22
        # ids, mask, four float32 columns to the ranks, each once; the mask to the process of the advantages
        assert step.bytes_got_per_token == 22
        assert 1 <= step.blocks_read_ratio <= 2


def test_files(small: tuple[TransferReport, TransferOptions]):
    report, chosen = small
    assert [len(table.columns) > 1 for table in tables(report)] == [True] * 6
    text = write_report(report, chosen, "headrace bench transfer --quick").read_text()
    assert "not measured: transferqueue: needs Ray" in text and "commit: " in text
    for name in ("throughput.png", "size.png", "latency.png"):
        assert f"({name})" in text
        assert (chosen.out / name).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (chosen.out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(report.results) + len(report.steps)
    assert all(line["conditions"]["commit"] and line["runs"] >= 3 for line in lines)


def test_a_flipped_byte_fails_the_case_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = StoreEndpoint.get

    def flip(self, token, share, fields):  # noqa: ANN001, ANN202
        batch = real(self, token, share, fields)
        if share.count == 8 and share.index == 3:
            batch.jagged("logprobs").values.view(-1)[-1:].neg_()
        return batch

    monkeypatch.setattr(StoreEndpoint, "get", flip)
    report = run_transfer(options(tmp_path, stores=("local",), patterns=("get", "shuffled")), lambda line: None)
    failed = failures(report)
    assert [line.split(":")[0] for line in failed] == ["rl-256, local", "rl-256, local+checksum"]
    assert "field 'logprobs' differs in 1 rows" in failed[0]
    assert {result.contender for result in report.results if result.seconds} == {"memcpy", "raw tcp", "zmq"}
    assert not [name for name in report.summary if ".local." in name]


def test_wrong_names_are_told_in_one_sentence(tmp_path: Path):
    with pytest.raises(UserError, match="--stores: got shn, expected some of local, shm"):
        options(tmp_path, stores=("shn",))
    with pytest.raises(UserError, match="--pattern: got puts"):
        options(tmp_path, patterns=("put", "puts"))
    with pytest.raises(UserError, match="no store can start here: simple: needs Ray"):
        run_transfer(options(tmp_path, stores=("simple",)), lambda line: None)


def test_a_groups_prompt_costs_its_bytes_once(tmp_path: Path) -> None:
    options = TransferOptions(
        tmp_path, stores=("shm",), workloads=("moe",), patterns=("put",), baselines=("memcpy",), quick=True,
        in_process=True, share=0.06,
    )  # fmt: skip
    report = run_transfer(options, lambda line: None)
    assert not [result.failure for result in report.results if result.failure]
    assert 1.0 <= report.summary["moe.bytes_over_formula"] < 1.01
    assert 393 * 0.7 < report.summary["moe.bytes_put_per_token"] < 393, "384 of routes and 9 of the rest"
    assert report.summary["moe.padded_int32_over_formula"] > 4
    assert report.summary["moe.put.shm.vs_memcpy"] > 0


@pytest.mark.parametrize(
    ("workload", "phase", "measured", "missing"),
    [
        ("rl-256", "tiny: round 3 of 3", {"rl-256", "tiny"}, "tiny, padding, step"),
        ("rl-256", "step: round 3 of 3", {"rl-256", "tiny", "step-ends", "step"}, "step"),
        ("vlm", "vlm: round 2 of 3", {"vlm"}, "vlm, tiny, padding, step"),
    ],
)
def test_what_was_measured_before_an_interruption_is_kept(
    tmp_path: Path, workload: str, phase: str, measured: set[str], missing: str
) -> None:
    def until(line: str) -> None:
        if line.endswith(phase):
            raise KeyboardInterrupt

    chosen = options(tmp_path, workloads=(workload, "tiny"), stores=("shm",), baselines=("memcpy",))
    with pytest.raises(KeyboardInterrupt):
        run_transfer(chosen, until)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {line["workload"] for line in lines} == measured and all(line["runs"] > 0 for line in lines)
    summary = json.loads((tmp_path / "summary.json").read_text())
    told = summary["conditions"]["interrupted"]
    assert told.startswith("interrupted") and phase in told
    assert told.endswith(f"not measured or not to the end: {missing}") and len(summary) > 1
