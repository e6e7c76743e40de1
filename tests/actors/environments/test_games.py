"""Games of textarena: what the policy reads, opponents, seeds, and the death of the process. A small fake stands for
the library; the real one plays where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("renderers")

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments import child_process, games
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.games import TextArena
from headrace.actors.failures import SandboxFailed
from headrace.actors.protocols import Prompt, Sample
from headrace.tests.actors.environments.endpoint_world import TOKENIZER, Recorder, World

pytestmark = pytest.mark.processes

FAKE = """
import os, random, time
from types import SimpleNamespace as Some

ObservationType = Some(PLAYER_ACTION="action", GAME="game")


class Wrapper:
    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)


class ActionWrapper(Wrapper):
    def step(self, action):
        return self.env.step(f"[{action}]")


class ObservationWrapper(Wrapper):
    def get_observation(self):
        raise AssertionError("the whole history again")


class Draws:
    def __init__(self, last="end"):
        self.last = last

    def reset(self, num_players, seed):
        print("noise on the standard output")
        random.seed(seed)
        self.players, self.player = num_players, 0
        self.state = Some(role_mapping={0: "White", 1: "Black"})
        self.new = {player: [(-1, f"You are {player}. Drew {random.random():.6f}.", "game")] for player in range(2)}

    def get_observation(self):
        seen, self.new[self.player] = self.new[self.player], []
        return self.player, seen

    def step(self, action):
        if action == "[die]":
            os._exit(7)
        if action == "[hang]":
            time.sleep(3600)
        if action == "[bad]":
            raise ValueError("no such move")
        for seen in self.new.values():
            seen += [(self.player, action, "action"), (-1, f"Drew {random.random():.6f}.", "game")]
        self.player = (self.player + 1) % self.players
        return action == f"[{self.last}]", {}

    def close(self):
        return {0: 1.0, 1: -1.0}, {}


def make(name, **options):
    if name != "Draws-v0":
        raise ValueError(f"{name} not found in registry.")
    return ObservationWrapper(ActionWrapper(Draws(**options)))
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """A folder with a module `textarena` of the few names that the process uses."""
    (tmp_path / "textarena.py").write_text(FAKE)
    return str(tmp_path)


def played(environment: Any, engine: Recorder, tasks: list[int], *, n: int = 1, **config: Any) -> list[Sample]:
    """Play `n` episodes of each task, one task after the other."""

    async def main() -> list[Sample]:
        world = World(environment, engine, config=EnvironmentConfig(**{"retries": 0, **config}))
        params = SamplingParams(n=n, max_new_tokens=3000)
        try:
            found = []
            for task in tasks:
                found += await world.host.run(Prompt(f"p{task}", "", "", {"task": task}), engine, TOKENIZER, params)
            return found
        finally:
            await world.host.close()

    return asyncio.run(main())


def read(sample: Sample) -> str:
    """Return the text of the row."""
    return str(TOKENIZER.decode(sample.input_ids.tolist()))


class Saying(Recorder):
    """An engine that says one text in the first task's episodes, and `end` in others."""

    def __init__(self, text: str) -> None:
        super().__init__(text, version=5)
        self._first = text

    def _say(self, request_id: str, prompt_ids: Any, sample: int) -> list[int]:
        self._texts = (self._first,) if request_id.startswith("p0") else ("end",)
        return super()._say(request_id, prompt_ids, sample)


def test_a_game_is_the_same_for_all_episodes_of_a_prompt_and_again_in_another_process(fake: str) -> None:
    first, again = (
        played(TextArena("Draws-v0", path=[fake]), Recorder("a", "b", "end"), [4, 5], n=3) for _ in range(2)
    )
    assert [sample.error for sample in first] == [""] * 6
    rows = [read(sample) for sample in first]
    assert rows[0] == rows[1] == rows[2] != rows[3] and rows == [read(sample) for sample in again]
    assert rows[0].count("Drew ") == 3 and "[a]" not in rows[0], "it reads what is new, not its own actions"
    assert {tuple(sample.rewards.items()) for sample in first} == {(("reward", 1.0),)}
    assert {sample.finish_reason for sample in first} == {"stop"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("bad", "RuntimeError: ValueError: no such move"),
        ("hang", "TimeoutError: the environment took longer than environment.turn_timeout_s=2 s"),
        ("die", "SandboxFailed: the textarena process has ended"),
    ],
)
def test_an_episode_that_fails_fails_alone(fake: str, said: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(games, "CLOSE_S", 0.5)
    environment = TextArena("Draws-v0", path=[fake])
    first, *others = played(environment, Saying(said), [0, 1, 2], turn_timeout_s=2.0 if said == "hang" else 60.0)
    assert words in first.error and [other.error for other in others] == ["", ""]


def test_a_process_that_only_dies_is_not_started_for_ever(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_STARTS", 3)
    found = played(TextArena("Draws-v0", {"last": "end"}, path=[fake]), Recorder("die"), [0, 1, 2, 3])
    assert all("ended" in sample.error for sample in found), "it answered before it died, so it is replaced"
    found = played(TextArena("Draws-v1", path=[fake]), Recorder("x"), [0, 1, 2, 3])
    assert "environment.options: textarena cannot load {'game': 'Draws-v1'" in found[0].error
    assert "was started 3 times in vain" in found[3].error and "Draws-v1 not found" in found[3].error


def shout(text: str) -> str:
    return "end" if text.count("Drew ") == 1 else f"heard {text.count('[White]')}"


def test_opponents_answer_and_only_the_policy_is_trained_on(fake: str) -> None:
    environment = TextArena("Draws-v0", players=2, opponent=f"{__name__}:shout", path=[fake])
    white, black = played(environment, Recorder("a", "end"), [0, 1])
    assert not white.error and not black.error
    assert (white.rewards, black.rewards) == ({"reward": 1.0}, {"reward": -1.0}), "player 1 plays odd tasks"
    assert "[Black] [heard 1]" in read(white) and len(white.turns) == 2
    environment = TextArena("Draws-v0", players=2, path=[fake])
    [sample] = played(environment, Recorder("a", "b", "end"), [0])
    texts = [turn.text for turn in sample.turns]
    assert "[Black] [b]" in read(sample) and texts == ["a", "end"] and sample.response_mask.sum() == 6


def test_limits_cut_a_game_off(fake: str) -> None:
    [sample] = played(TextArena("Draws-v0", path=[fake], max_turns=2, turn_tokens=1), Recorder("xyz"), [0])
    assert [turn.text for turn in sample.turns] == ["x", "x"]
    assert (sample.finish_reason, sample.rewards) == ("length", {"reward": 0.0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"game": ""}, "environment.options.game: got ''"),
        ({"players": 0}, "environment.options.players: got 0, expected a whole number >= 1"),
        ({"turn_tokens": True}, "environment.options.turn_tokens: got True"),
        ({"opponent": "random"}, "environment.options.opponent: got 'random'"),
        ({"python": "/no/python"}, "environment.options.python: got '/no/python'"),
        ({"path": "games"}, "environment.options.path: got 'games', expected a list of folders"),
        ({"path": ["games"]}, "environment.options.path: got 'games', expected a folder"),
        ({"python": sys.executable, "options": 3}, "environment.options.options: got 3, expected a section"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TextArena(**{"game": "Draws-v0", **options})


def test_textarena_itself_plays() -> None:
    python = os.environ.get("HEADRACE_GAMES_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec("textarena") is None:
        pytest.skip("needs textarena: make test-all")
    environment = TextArena("GuessTheNumber-v0", python=python)
    first, second = played(environment, Recorder("3", "[4]", "20", "5", "nothing"), [7], n=2)
    assert not first.error and read(first) == read(second)
    assert "between 1 and 20" in read(first) and "The target number is higher." in read(first)
    assert 0.0 < first.rewards["reward"] <= 1.0


TORN = """
import json, os, sys
sys.stdin.readline()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if json.loads(line)["do"] == "torn":
        os.write(1, b'{"id": 0, "text": "half')
        os.kill(os.getpid(), 9)
    sys.stderr.write("x" * 5000 + "\\n")
    sys.stderr.flush()
    os.write(1, b'{"id": 0, "text": "' + b"x" * 5000 + b'"}\\n')
"""


@pytest.mark.parametrize(("do", "said"), [("torn", "has ended"), ("long", "its answer cannot be read: ")])
def test_an_answer_that_cannot_be_read_ends_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str, said: str
) -> None:
    """The process was killed within a line, or a line is longer than a line may be."""
    monkeypatch.setattr(child_process, "_LINE_BYTES", 1000)
    script = tmp_path / "torn.py"
    script.write_text(TORN)

    async def main() -> None:
        child = await child_process.ChildProcess.start("torn", script, {}, sys.executable)
        try:
            async with asyncio.timeout(20):
                with pytest.raises(SandboxFailed, match=said):
                    await child.call({"do": do})
        finally:
            await child.close()

    asyncio.run(main())


class Busy:
    """Stands for a process that has not answered a call within the limit, but has answered `others` meanwhile."""

    def __init__(self, others: int) -> None:
        self.num_answers, self.others, self.killed = 0, others, False

    async def call(self, message: object) -> None:
        self.num_answers += self.others
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("others", [0, 3])
def test_a_process_is_replaced_if_it_hangs_not_if_it_is_busy(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    monkeypatch.setattr(games, "CLOSE_S", 0.01)
    child: Any = Busy(others)
    asyncio.run(games._end(child, "a"))
    assert child.killed == (others == 0)
