"""Growing memory is told apart from flat memory."""

from __future__ import annotations

from pathlib import Path

from headrace.tests.drills.chaos.memory import LEAST_SAMPLES, MemoryLog


def grown(tmp_path: Path, sizes: list[int]) -> bool:
    log, pool = MemoryLog(tmp_path / "memory.jsonl"), tmp_path / "pool"
    log.sample({}, [])  # nothing is there before the run has started, and that is no sample
    for size in sizes:
        pool.write_bytes(b"x" * size)
        log.sample({}, [pool])
    [growth] = log.growths()
    assert len((tmp_path / "memory.jsonl").read_text().splitlines()) == 1 + len(sizes)
    return not growth.flat


def test_only_memory_that_grows_is_complained_of(tmp_path: Path):
    (tmp_path / "flat").mkdir()
    (tmp_path / "grows").mkdir()
    assert not grown(tmp_path / "flat", [1 << 20] * LEAST_SAMPLES)
    assert grown(tmp_path / "grows", [1 << 20] * (LEAST_SAMPLES // 2) + [12 << 20] * (LEAST_SAMPLES // 2))
