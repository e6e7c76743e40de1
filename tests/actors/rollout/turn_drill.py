"""The kill drill of the journal of turns, a program: `turn_drill.py FOLDER`.

Each round forks a process that plays a group of 24 episodes of five turns, in pieces, and logs each answer of its
engine. It is killed (SIGKILL) once the journal has grown by a random number of bytes. The last round plays the group to
its end. AssertionError when an engine made what the journal had, or when a turn in the rows is not exactly what the
engines made.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.environments.recovery import TurnRecord
from headrace.actors.rollout.journal_segments import read_body, read_heads
from headrace.codecs import messages
from headrace.tests.actors.rollout.journal_drill import play_until_killed
from headrace.tests.actors.rollout.turn_lives import TURNS, Life, MortalEngine

EPISODES, PIECE = 24, 3
KILLS = 5


class LoggingEngine(MortalEngine):
    """Writes each answer to a file before anyone sees it."""

    def __init__(self, log: Path, life: int) -> None:
        super().__init__(life, latency_s=0.02, latency_sigma=0.5)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def generate(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> list[Completion]:
        [completion] = await super().generate(request_id, prompt_ids, params)
        line = {"request": request_id, "prompt": list(prompt_ids), "answer": completion.token_ids.tolist()}
        os.write(self._log, json.dumps(line).encode() + b"\n")
        return [completion]


def main(folder: Path) -> None:
    rng, made = random.Random(1), list[dict[str, Any]]()
    for life in range(KILLS):
        before = recorded(folder)
        now = killed_round(folder, life, rng.randrange(2_000, 12_000))
        assert not {one["request"] for one in now} & before, "made although the journal had it"
        made += now
        print(f"killed: {len(now)} answers made, {len(recorded(folder)) - len(before)} of them recorded")
    before = recorded(folder)
    last = play(folder, KILLS)
    now = logged(folder, KILLS)
    assert not {one["request"] for one in now} & before
    made += now
    assert last.samples is not None and last.policy.unmatched == 0
    known = {(tuple(one["prompt"]), tuple(one["answer"])) for one in made}
    for sample in last.samples:
        assert len(sample.turns) == TURNS and not sample.error
        ids = sample.input_ids.tolist()
        for turn in sample.turns:
            start, end = turn.start, turn.start + turn.num_tokens
            while start < end:  # A turn is one piece after another.
                ends = range(min(start + PIECE, end), start, -1)
                start = next(stop for stop in ends if (tuple(ids[:start]), tuple(ids[start:stop])) in known)
    print(f"all turns once; {last.policy.recovered_turns} turns recovered")


def play(folder: Path, life: int) -> Life:
    return Life(folder / "journal", LoggingEngine(log_of(folder, life), life), n=EPISODES, piece_tokens=PIECE)


def killed_round(folder: Path, life: int, num_bytes: int) -> list[dict[str, Any]]:
    """The answers that a process made until it was killed, when the journal had grown by `num_bytes`."""
    begin = size(folder)
    play_until_killed(lambda: play(folder, life), lambda: size(folder) >= begin + num_bytes)
    return logged(folder, life)


def log_of(folder: Path, life: int) -> Path:
    return folder / f"made{life}.log"


def logged(folder: Path, life: int) -> list[dict[str, Any]]:
    path = log_of(folder, life)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded(folder: Path) -> set[str]:
    """Requests whose answers the journal has."""
    heads = [(path, offset) for path in segments(folder) for offset, _ in read_heads(path, 0)[0]]
    return {messages.decode(read_body(path, offset)[1], TurnRecord).request_id for path, offset in heads}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder))


def segments(folder: Path) -> list[Path]:
    return list((folder / "journal").glob("*.turns"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
