"""What a switch of roles costs: the measurements of the trainer's side, and the summary of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.bench.gpu.work_report import WorkReport
from headrace.tools.measure import switch_trainer
from headrace.tools.measure.switch import SwitchOptions, run_switch, summarise_switch
from headrace.tools.measure.switch_trainer import SwitchFigures, checksum, link_bytes_per_s, measure_switches, wrong
from headrace.trainers.errors import UserError

CPU = torch.device("cpu")
RIGHT = SwitchFigures(
    num_bytes=1000, first_offload_s=9.0, offload_s=(1.0, 3.0, 2.0), onload_s=(4.0, 4.0, 4.0), to_host_s=1.0,
    to_device_s=2.0, group_teardown_s=0.1, group_rebuild_s=0.2, growth_bytes=0, same=True, grad_norm=0.4,
)  # fmt: skip


class FakeBackend:
    """Holds one weight, which is there only while it is onloaded. With `forgets` it comes back changed."""

    def __init__(self, forgets: bool = False) -> None:
        self.weight: torch.Tensor | None = torch.arange(8.0)
        self.calls: list[str] = []
        self._forgets = forgets

    def offload(self) -> None:
        self.calls.append("offload")
        self.weight = None

    def onload(self) -> None:
        self.calls.append("onload")
        self.weight = torch.arange(8.0) + self._forgets

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weight is not None
        yield "w", self.weight


@pytest.fixture
def small_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_trainer, "link_bytes_per_s", lambda device: (100.0, 50.0))


@pytest.mark.usefixtures("small_link")
def test_each_cycle_is_an_offload_and_an_onload(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, used = FakeBackend(), itertools.cycle([1000])
    monkeypatch.setattr(switch_trainer, "used_bytes", lambda device: 200 if backend.weight is None else next(used))
    phases: list[str] = []
    figures = measure_switches(backend, lambda: 0.4, CPU, 4, (0.1, 0.2), phases.append)
    assert phases[:4] == [f"cycle {number} of 4" for number in (1, 2, 3, 4)]
    assert backend.calls == ["offload", "onload"] * 4
    assert len(figures.offload_s) == len(figures.onload_s) == 3, "the first cycle is not counted"
    assert figures.num_bytes == 800 and figures.to_host_s == 8.0 and figures.to_device_s == 16.0
    assert figures.same and figures.growth_bytes == 0 and wrong(figures) == []


@pytest.mark.usefixtures("small_link")
def test_weights_that_come_back_changed_are_found() -> None:
    figures = measure_switches(FakeBackend(forgets=True), lambda: 0.4, CPU, 2, (0.1, 0.2), print)
    assert wrong(figures) == [
        "the trainer's offload freed no memory of its GPU",
        "the trainer's weights changed while it was offloaded and brought back",
    ]


def test_what_a_switch_must_not_leave_behind_is_told() -> None:
    assert wrong(RIGHT) == [] == wrong(replace(RIGHT, growth_bytes=10))
    assert "holds 11 bytes more" in wrong(replace(RIGHT, growth_bytes=11))[0]
    assert "gradient norm of nan" in wrong(replace(RIGHT, grad_norm=float("nan")))[0]


def test_a_checksum_sees_one_bit() -> None:
    backend = FakeBackend()
    before = checksum(backend)
    assert backend.weight is not None
    backend.weight.view(torch.uint8)[5] ^= 1
    assert checksum(backend) != before


def test_the_link_and_a_group_are_timed() -> None:
    assert all(rate > 0 for rate in link_bytes_per_s(CPU, num_bytes=1 << 16, repeats=2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        assert all(seconds > 0 for seconds in switch_trainer.time_group(CPU, 2))
    finally:
        dist.destroy_process_group()


def test_the_summary_has_each_figure_once() -> None:
    records: list[dict[str, Any]] = [{"record": "limit", "seconds": 1.0}]
    for cycle in (9.0, 1.0, 3.0, 2.0):
        records.append({"record": "colocated", "sleep_s": cycle, "update_s": 2 * cycle, "wake_s": cycle})
    slow = replace(RIGHT, offload_s=(5.0, 5.0))
    summary = summarise_switch("switch-2g", records, [RIGHT, slow])
    assert summary["gpu.switch-2g.engine_sleep_s"] == 2.0 and summary["gpu.switch-2g.engine_wake_and_update_s"] == 6.0
    assert summary["gpu.switch-2g.offload_s"] == 5.0 and summary["gpu.switch-2g.offload_vs_link"] == 5.0
    assert summary["gpu.switch-2g.onload_vs_link"] == 2.0 and summary["gpu.switch-2g.nccl_rebuild_s"] == 0.2
    nothing_freed = replace(RIGHT, num_bytes=0, to_host_s=0.0, to_device_s=0.0)
    assert summarise_switch("switch-2g", [], [RIGHT, nothing_freed]) == {}


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="--work: got 'switch-2g' on a machine without a GPU"):
        run_switch(SwitchOptions(tmp_path, "switch-2g"), WorkReport("switch-2g", tmp_path))
