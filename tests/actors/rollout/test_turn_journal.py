"""The journal of turns: episodes go on after a death, with the tokens, log-probs, versions and routes that they had."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import SingleTurn, check_environment, recovery_mode
from headrace.actors.environments.recovery import TurnRecord
from headrace.actors.rollout.journal_segments import DamagedJournal
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.actors.rollout import turn_drill
from headrace.tests.actors.rollout.test_journal import group
from headrace.tests.actors.rollout.turn_lives import (
    TURNS,
    Life,
    MortalEngine,
    check_rows,
    open_turns,
)
from headrace.tests.full_disk import file_size_limit
from headrace.tests.trainers.config.refusals import only_problem

ROUTES = RouteSpec((0, 2), 2, 8, 3)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.turns"))


def test_an_episode_goes_on_from_its_last_turn(tmp_path: Path) -> None:
    first = Life(tmp_path, MortalEngine(1, answers=7, routes=ROUTES))
    assert first.samples is None and len(first.engine.made) == 7
    second = Life(tmp_path, MortalEngine(2, routes=ROUTES))
    assert second.samples is not None
    assert len(second.engine.made) == 2 * TURNS - 7, "each turn was made once"
    check_rows(second.samples, [first, second])
    assert (second.policy.recovered_turns, second.policy.unmatched) == (7, 0)
    assert second.policy.recovered_tokens == sum(len(answer) for _, _, answer in first.engine.made)
    versions = [np.unique(sample.versions).tolist() for sample in second.samples]
    assert versions == [[-1, 1, 2], [-1, 1, 2]]
    whole = Life(tmp_path / "other", MortalEngine(1, routes=ROUTES))
    assert whole.samples is not None
    for sample, other in zip(second.samples, whole.samples, strict=True):
        assert sample.rewards["environment" if "environment" in sample.rewards else "reward"] > 0
        known = sample.versions == 1
        end = np.flatnonzero(known)[-1] + 1
        for name in ("input_ids", "logprobs", "response_mask", "versions"):
            assert (getattr(sample, name)[:end] == getattr(other, name)[:end]).all()
        assert [start for start, _ in sample.routes] == sorted(start for start, _ in sample.routes)
        for (start, routes), (begin, expected) in zip(sample.routes[:3], other.routes[:3], strict=True):
            assert start == begin and np.array_equal(routes, expected) and routes.dtype == expected.dtype


def test_a_third_life_makes_nothing_again(tmp_path: Path) -> None:
    lives = [Life(tmp_path, MortalEngine(life, answers=3)) for life in range(3)]
    last = Life(tmp_path, MortalEngine(3))
    assert last.samples is not None
    check_rows(last.samples, [*lives, last])
    assert sum(len(life.engine.made) for life in (*lives, last)) == 2 * TURNS
    again = Life(tmp_path, MortalEngine(4, answers=0))
    assert again.tokens == last.tokens, "it ended before its group was in the journal"


def test_a_torn_turn_is_made_again(tmp_path: Path) -> None:
    first = Life(tmp_path, MortalEngine(1, answers=4), n=1)
    [path] = segments(tmp_path)
    os.truncate(path, path.stat().st_size - 3)
    second = Life(tmp_path, MortalEngine(2), n=1)
    assert second.samples is not None and (second.policy.recovered_turns, len(second.engine.made)) == (3, 2)
    check_rows(second.samples, [first, second])


def test_a_changed_byte_is_an_error(tmp_path: Path) -> None:
    Life(tmp_path, MortalEngine(1, answers=4), n=1)
    [path] = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedJournal, match=rf"^journal: {path}, record at byte "):
        Life(tmp_path, MortalEngine(2), n=1)


def test_an_environment_that_asks_something_else_gets_a_new_turn(tmp_path: Path) -> None:
    async def moody(episode: Episode) -> None:
        for number in range(TURNS):
            await episode.generate(max_new_tokens=40)
            episode.add_text(f"{mood if number == 2 else 'x'} ")

    mood = "sunny"
    first = Life(tmp_path, MortalEngine(1, answers=5), moody, n=1)
    mood = "rainy"
    second = Life(tmp_path, MortalEngine(2), moody, n=1)
    assert second.samples is not None and second.policy.recovered_turns == 3
    assert second.policy.unmatched == 2 and len(second.engine.made) == 2
    check_rows(second.samples, [first, second])


def test_the_same_question_asked_twice_gets_both_answers(tmp_path: Path) -> None:
    async def votes(episode: Episode) -> None:
        async def vote() -> None:
            completion, text = await episode.sample_turn([7, 8], 40)
            answers.append(completion.token_ids.tolist())

        await asyncio.gather(*(vote() for _ in range(3)))
        await episode.generate()

    answers: list[list[int]] = []
    first = Life(tmp_path, MortalEngine(1, answers=3), votes, n=1)
    before, answers = sorted(answers), []
    second = Life(tmp_path, MortalEngine(2), votes, n=1)
    assert second.samples is not None and len(second.engine.made) == 1 and len(first.engine.made) == 3
    assert sorted(answers) == before


def test_a_turn_that_was_cancelled_while_it_was_written_is_not_made_again(tmp_path: Path) -> None:
    async def impatient(episode: Episode) -> None:
        await episode.generate(max_new_tokens=40)
        if not lives:
            turn = asyncio.create_task(episode.generate(max_new_tokens=40))
            while len(engine.made) < 2:
                await asyncio.sleep(0)
            turn.cancel()
            await asyncio.wait({turn})
            assert turn.cancelled()
        await episode.generate(max_new_tokens=40)
        episode.add_text(" x ")
        await episode.generate(max_new_tokens=40)

    lives: list[Life] = []
    engine = MortalEngine(1, answers=2)
    lives.append(Life(tmp_path, engine, impatient, n=1))
    lives.append(Life(tmp_path, MortalEngine(2), impatient, n=1))
    assert lives[1].samples is not None and lives[1].policy.unmatched == 0
    assert [len(life.engine.made) for life in lives] == [2, 1]
    check_rows(lives[1].samples, lives)


def test_a_record_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    async def main() -> list[None | BaseException]:
        turns = open_turns(tmp_path)
        completion = Completion(np.ones(3, np.int32), np.zeros(3, np.float32), "stop", np.ones(3))
        records = [TurnRecord(name, 5, [completion]) for name in ("p.0/0", "\ud800", "p.1/0")]
        results = await asyncio.gather(*(turns.write(0, record) for record in records), return_exceptions=True)
        await turns.close()
        return results

    first, wrong, last = asyncio.run(main())
    assert first is None and isinstance(wrong, UnicodeEncodeError) and last is None


def test_of_two_writers_each_turn_is_in_a_row_once(tmp_path: Path) -> None:
    """An actor that was thought dead still plays while its successor does."""

    async def main() -> None:
        hung, successor = open_turns(tmp_path), open_turns(tmp_path, "rollout 1")
        for journal, life in ((hung, 1), (successor, 2)):
            completion = Completion(np.full(3, life, np.int32), np.zeros(3, np.float32), "stop", np.full(3, life))
            await journal.write(0, TurnRecord("p.0/0", 5, [completion]))
            await journal.close()

    asyncio.run(main())
    third = Life(tmp_path, MortalEngine(3), n=1)
    assert third.policy.unmatched == 1, "the second answer to the same request is left out"


def test_files_of_finished_groups_are_removed(tmp_path: Path) -> None:
    def answer() -> TurnRecord:
        return TurnRecord("p.0/0", 5, [Completion(np.ones(3, np.int32), np.zeros(3, np.float32), "stop", np.ones(3))])

    async def main() -> None:
        turns = open_turns(tmp_path)
        for position in (0, 1, 2):
            await turns.write(position, answer())
            await turns.trim(0, ())
        assert len(segments(tmp_path)) == 3
        turns._groups.append([group(1)])
        turns._groups.refresh()
        await turns.trim(0, ())
        assert len(segments(tmp_path)) == 2, "the group at 1 is in the journal"
        await turns.trim(3, [2])
        assert len(segments(tmp_path)) == 1 and list(turns._places) == [2]
        await turns.write(3, answer())
        await turns.trim(5, ())
        assert segments(tmp_path) == [] and not turns._places
        await turns.close()
        turns._groups.close()

    asyncio.run(main())


def test_a_full_disk_ends_the_rollout_by_name(tmp_path: Path) -> None:
    with file_size_limit(300), pytest.raises(OSError, match=r"journal: .*\.turns cannot be written"):
        Life(tmp_path, MortalEngine(1))
    assert Life(tmp_path, MortalEngine(2)).samples is not None


class OneTry:
    """An environment that cannot be played again."""

    recover = "restart"

    async def play(self, episode: Episode) -> float:
        return 1.0


class Mistaken(OneTry):
    recover = "later"


def test_an_environment_says_that_it_cannot_be_played_again() -> None:
    path = f"{__name__}:OneTry"
    assert recovery_mode(EnvironmentConfig(kind=path)) == "restart"
    assert recovery_mode(EnvironmentConfig(kind="tool_use")) == "turn"
    assert recovery_mode(EnvironmentConfig(recover="prefix"), SingleTurn()) == "prefix"
    with pytest.raises(ValueError, match=r"^environment.recover: got 'prefix', expected 'restart', because '"):
        check_environment(EnvironmentConfig(kind=path, recover="prefix"), EndpointConfig())
    with pytest.raises(ValueError, match="has the attribute recover='later', expected 'restart' or no such attribute"):
        check_environment(EnvironmentConfig(kind=f"{__name__}:Mistaken"), EndpointConfig())


def test_pieces_and_exact_repetition_exclude_each_other() -> None:
    problem = only_problem({"environment": {"recover": "prefix"}, "run": {"deterministic": True}})
    assert "environment.recover: got 'prefix' with run.deterministic=true, expected 'turn'" in problem


# ---------------------------------------------------------------- environments that save their state


class Saving:
    """A game whose questions cannot be asked again, but which saves where it is."""

    def __init__(self, form: str = "json") -> None:
        self.form, self.loads = form, []
        self.places: dict[str, int] = {}

    async def play(self, episode: Episode) -> float:
        at = self.places.setdefault(episode.name, 0)
        while at < TURNS:
            turn = await episode.generate(max_new_tokens=40)
            episode.reward(float(at), "so far")
            at = self.places[episode.name] = at + 1
            episode.add_text(f" {id(self)} [{len(turn.text)}] ")
        return 1.0

    def save(self, episode: Episode) -> object:
        at = self.places[episode.name]
        return str(at).encode() if self.form == "bytes" else {"at": [at, "x"]} if self.form == "json" else self

    async def load(self, episode: Episode, state: Any) -> None:
        self.loads.append(len(episode.turns))
        self.places[episode.name] = int(state) if self.form == "bytes" else state["at"][0]


@pytest.mark.parametrize(("form", "piece_tokens"), [("bytes", 0), ("json", 3)])
def test_a_saved_state_is_loaded_and_the_episode_goes_on(tmp_path: Path, form: str, piece_tokens: int) -> None:
    environments = [Saving(form) for _ in range(3)]
    lives = [
        Life(tmp_path, MortalEngine(number, answers), one, n=1, piece_tokens=piece_tokens)
        for number, (answers, one) in enumerate(zip((2, 2, 99), environments, strict=True))
    ]
    assert lives[1].samples is None and lives[2].samples is not None and lives[2].policy.unmatched == 0
    [sample] = lives[2].samples
    assert len(sample.turns) == TURNS and sample.rewards == {"so far": TURNS - 1.0, "reward": 1.0}
    assert environments[0].loads == [] and len(environments[1].loads) == len(environments[2].loads) == 1
    if not piece_tokens:
        assert (environments[1].loads, environments[2].loads) == ([1], [3])
        check_rows(lives[2].samples, lives)
    tokens = sum(len(answer) for life in lives for _, _, answer in life.engine.made)
    assert np.count_nonzero(sample.response_mask) == tokens, "each token was made once"


def test_a_state_that_cannot_be_kept_fails_the_episode_in_a_sentence(tmp_path: Path) -> None:
    life = Life(tmp_path, MortalEngine(1), Saving("wrong"), n=1)
    assert life.samples is not None
    assert "the environment's `save` returned a Saving, expected bytes or JSON values" in life.samples[0].error


@pytest.mark.parametrize(
    ("answer", "error"), [("\ud800", ""), (3, "the environment set the answer to a int, expected")]
)
def test_an_answer_that_cannot_be_stored_does_not_spoil_the_journal(tmp_path: Path, answer: Any, error: str) -> None:
    class Answering(Saving):
        async def play(self, episode: Episode) -> float:
            episode.answer = answer
            return await super().play(episode)

    lives = [Life(tmp_path, MortalEngine(life, answers), Answering(), n=1) for life, answers in ((1, 2), (2, 99))]
    assert lives[1].samples is not None and error in lives[1].samples[0].error
    assert bool(lives[1].samples[0].error) == bool(error)


# ---------------------------------------------------------------- pieces of turns


def test_a_long_answer_goes_on_from_its_last_piece(tmp_path: Path) -> None:
    """Eight samples of one prompt, over three lives with another version of the weights each. Some answers end with a
    stop text that begins in one piece and ends in the next."""
    params = SamplingParams(n=8, max_new_tokens=37, stop=("ab", "cd"))

    def life(number: int, answers: int = 1 << 30, piece_tokens: int = 4) -> Life:
        engine = MortalEngine(number, answers, length=60, seed=4, routes=ROUTES)
        folder = tmp_path / ("pieces" if piece_tokens else "whole")
        return Life(folder, engine, SingleTurn(), params=params, piece_tokens=piece_tokens)

    whole = life(0, piece_tokens=0)
    lives = [life(1, 11), life(2, 9), life(3)]
    assert lives[0].samples is lives[1].samples is None
    assert lives[2].tokens == whole.tokens
    assert whole.samples is not None and lives[2].samples is not None
    requests = [one[0] for each in lives for one in each.engine.made if "again" in one[0]]
    assert 18 < len(requests) == len(set(requests)), "a piece was made twice"
    borders = 0
    for sample, other in zip(lives[2].samples, whole.samples, strict=True):
        assert (sample.finish_reason, sample.text) == (other.finish_reason, other.text)
        [[start, routes]], [[begin, expected]] = sample.routes, other.routes
        assert start == begin and np.array_equal(routes, expected)
        chosen = sample.versions[sample.response_mask == 1]
        assert chosen[0] == 1 and (np.diff(chosen) >= 0).all()
        count = len(chosen)
        borders += sample.text.endswith(("ab", "cd")) and count % 4 == 1
    assert borders, "no stop text crossed a border"
    assert {1, 2, 3} <= {version for sample in lives[2].samples for version in sample.versions.tolist()}


def test_the_pieces_of_an_agents_turns_answer_whatever_the_order_of_its_calls(tmp_path: Path) -> None:
    async def agent(episode: Episode) -> None:
        async def call(prompt: int) -> None:
            await asyncio.sleep(0.01 * (prompt - 10) if len(lives) % 2 else 0.01 * (14 - prompt))
            completion, _ = await episode.sample_turn([prompt], 40)
            answers[prompt] = completion.token_ids.tolist()

        await asyncio.gather(*map(call, range(11, 14)))

    lives: list[Life] = []
    answers: dict[int, list[int]] = {}
    lives.append(Life(tmp_path, MortalEngine(1, 7, length=40), agent, n=1, piece_tokens=5))
    lives.append(Life(tmp_path, MortalEngine(2, length=40), agent, n=1, piece_tokens=5))
    assert lives[0].samples is None and lives[1].samples is not None and lives[1].policy.unmatched == 0
    assert lives[1].policy.recovered_tokens == sum(len(one[2]) for one in lives[0].engine.made)
    assert sum(map(len, answers.values())) == sum(len(one[2]) for each in lives for one in each.engine.made)


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_kill_9_at_random_moments_of_an_episode(tmp_path: Path) -> None:
    """Real processes, killed while they play; see turn_drill.py."""
    command = [sys.executable, turn_drill.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed") == turn_drill.KILLS and "all turns once" in done.stdout
