"""The journal's kill drill, a program: `journal_drill.py MODEL_FOLDER JOURNAL_FOLDER`.

Each round forks a process that rolls out GROUPS prompts over a data plane of its own and logs every prompt that it
generates, and kills it (SIGKILL) once the journal has grown by a random number of bytes. When little is left, the last
one runs to its end and checks that every row is there once. AssertionError when a round generated what an earlier one
had finished.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from headrace.actors.rollout.journal_segments import read_heads
from headrace.tests.actors.rollout.journal_runs import Life, keys_of, open_journal, segments

GROUPS = 80
LEFT = 20
"""Groups that are left for the last round, or fewer."""


def main(model_folder: str, folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    rng = random.Random(0)
    finished: set[int] = set()
    while len(finished) < GROUPS - LEFT:
        generated = killed_round(tokenizer, folder, rng.randrange(1, 6_000))
        assert not generated & finished, f"generated again: {sorted(generated & finished)}"
        now = journaled(folder)
        assert finished <= now and now - finished <= generated
        print(f"killed: {len(generated)} generated, {len(now) - len(finished)} finished, {GROUPS - len(now)} to go")
        finished = now
    life = Life(tokenizer, open_journal(folder), version=1)
    report = life.rollout(range(GROUPS))
    assert sorted(life.rows()) == sorted(keys_of(range(GROUPS)))
    assert set(life.generated) == set(range(GROUPS)) - finished and len(life.generated) == GROUPS - len(finished)
    life.end()
    print(f"all groups once; {report.restored} rows restored")


def killed_round(tokenizer: PreTrainedTokenizerFast, folder: Path, num_bytes: int) -> set[int]:
    """Positions that a process generated until it was killed, when the journal had grown by `num_bytes`."""
    log = folder / "generated.log"
    log.unlink(missing_ok=True)
    begin = size(folder)

    def play() -> None:
        Life(tokenizer, open_journal(folder), latency_s=0.3, log=log).rollout(range(GROUPS))

    play_until_killed(play, lambda: size(folder) >= begin + num_bytes)
    return {int(line) for line in log.read_text().split()} if log.exists() else set()


def play_until_killed(play: Callable[[], object], reached: Callable[[], bool]) -> None:
    """Call `play` in a process of its own, and kill it as soon as `reached` returns True, or after 30 s."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            play()
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(1e-4)
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):  # it came to its end before
        pass


def size(folder: Path) -> int:
    """Bytes of the journal."""
    return sum(path.stat().st_size for path in segments(folder))


def journaled(folder: Path) -> set[int]:
    """Positions that the journal holds whole."""
    return {head.position for path in segments(folder) for _, head in read_heads(path, 0)[0]}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
