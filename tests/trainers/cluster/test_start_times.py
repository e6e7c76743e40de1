"""What a run tells of its start."""

from __future__ import annotations

import time

import psutil

from headrace.trainers.cluster.start_times import StartTimes


def test_moments_count_from_the_begin_and_have_names_of_metrics() -> None:
    times = StartTimes(time.time() - 100)
    times.mark("Ray")
    times.mark("train worker 0")
    figures = times.figures()
    assert list(figures) == ["start/ray_s", "start/train_worker_0_s"]
    assert 100 <= figures["start/ray_s"] <= figures["start/train_worker_0_s"] < 200
    assert str(times).startswith("started in 100.")


def test_those_of_a_process_include_its_imports() -> None:
    times = StartTimes.of_process()
    times.mark("imports")
    assert abs(times.figures()["start/imports_s"] - (time.time() - psutil.Process().create_time())) < 5
