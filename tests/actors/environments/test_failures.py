"""Tests of failed episodes: kinds, retries, rewards of 0, stops, counts, and the key's former name."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError, JudgeFailed, LimitExceeded, SandboxFailed
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.token_sampling import ContextExceeded
from headrace.actors.environments import host as hosting
from headrace.actors.environments.config import EnvironmentConfig, OnFailure
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.environments.recovery import RecoveringEngine
from headrace.actors.environments.tool_use import ToolUse
from headrace.actors.environments.turns import Transcript
from headrace.actors.failures import FailureStopsRun, kind_of_error
from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards.builtin import EnvironmentReward
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.sample_file import SampleFile, SamplesConfig
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer
from headrace.tests.actors.rollout.test_rollout import FakeClient, worker
from headrace.trainers.cluster.rollout_specs import fingerprint
from headrace.trainers.config.load import build_config
from headrace.trainers.observe.samples import read_samples

TOKENIZER = make_chat_tokenizer()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "RETRY_WAIT_S", 0.001)


def play(environment: Any, engine: Any = None, n: int = 1, **treatments: Any) -> list[Sample]:
    config = EnvironmentConfig(on_failure=OnFailure(**treatments), turn_timeout_s=0.2)
    host = EpisodeHost(environment, config)
    engine = engine or TalkingEngine(TOKENIZER, "ab")
    params = SamplingParams(n=n, max_new_tokens=40)
    return asyncio.run(host.run(Prompt("p", "q", "", {}), engine, TOKENIZER, params))


class Moody:
    """Raises `error` in the first `failures` attempts at each episode."""

    def __init__(self, error: BaseException | None, failures: int = 99) -> None:
        self.error, self.failures, self.plays = error, failures, Counter()
        self.recover: str | None = None

    async def play(self, episode: Episode) -> float:
        await episode.generate(max_new_tokens=1)
        self.plays[episode.index] += 1
        if self.error is None:
            await asyncio.sleep(3600)
        elif self.plays[episode.index] <= self.failures:
            raise self.error
        return 1.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("mine"), "environment"),
        (SandboxFailed("no container"), "sandbox"),
        (ConnectionRefusedError("no server"), "sandbox"),
        (ExceptionGroup("tasks", [KeyError("a"), ConnectionResetError("gone")]), "sandbox"),
        (JudgeFailed("no answer"), "judge"),
        (LimitExceeded("too many steps"), "limit"),
        (None, "limit"),
    ],
)
def test_each_error_has_a_kind(error: BaseException | None, kind: str) -> None:
    [sample] = play(Moody(error), sandbox="mask")
    assert (sample.failure, sample.finish_reason, sample.retries) == (kind, "error", 0)
    assert (str(error) if error else "turn_timeout_s=0.2") in sample.error
    assert error is None or kind_of_error(pickle.loads(pickle.dumps(error))) == kind


class Refusing(TalkingEngine):
    """Refuses the requests of episode 1, the first `refusals` times."""

    def __init__(self, error: Exception, refusals: int = 99) -> None:
        super().__init__(TOKENIZER, "ab")
        self.error, self.refusals = error, refusals

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
        if request_id.startswith("p.1/") and self.refusals:
            self.refusals -= 1
            raise self.error
        return await super().generate(request_id, prompt_ids, params)


async def hides_errors(episode: Episode) -> float:
    try:
        await episode.generate(max_new_tokens=1)
    except ValueError as error:
        raise RuntimeError("the agent ended") from error
    return 1.0


def test_what_the_engine_refuses_is_its_failure_and_a_full_context_a_limit() -> None:
    good, bad = play(hides_errors, Refusing(ValueError("not finite")), n=2)
    assert (good.failure, bad.failure, bad.retries) == (None, "engine", 2)
    assert play(hides_errors, Refusing(ValueError("not finite"), refusals=2), n=2)[1].rewards == {"reward": 1.0}
    _, full = play(hides_errors, Refusing(ContextExceeded("too long")), n=2)
    assert (full.failure, full.retries) == ("limit", 0)
    _, kept = play(hides_errors, Refusing(ContextExceeded("too long")), n=2, limit="partial")
    assert (kept.failure, kept.finish_reason) == (None, "length")


def test_a_retry_plays_a_fresh_episode_with_the_same_turns_and_is_bounded() -> None:
    moody, engine = Moody(SandboxFailed("gone"), failures=2), TalkingEngine(TOKENIZER, "ab")
    samples = play(moody, engine, n=3)
    assert [(s.failure, s.retries, len(s.turns), s.rewards["reward"]) for s in samples] == [(None, 2, 1, 1.0)] * 3
    asked = Counter(request for request, *_ in engine.seen)
    assert asked == {f"p.{index}/0": 1 for index in range(3)}, "the first attempt's turns answer again"
    moody = Moody(SandboxFailed("gone"))
    [sample] = play(moody)
    assert (sample.failure, sample.retries, moody.plays[0]) == ("sandbox", 2, 3)
    moody = Moody(ValueError("a bug"))
    assert play(moody)[0].retries == 0 and moody.plays[0] == 1, "retry is not for every kind"


def test_what_cannot_be_played_again_is_drawn_anew() -> None:
    moody, engine = Moody(SandboxFailed("gone"), failures=1), TalkingEngine(TOKENIZER, "ab")
    moody.recover = "restart"
    assert play(moody, engine)[0].retries == 1 and len(engine.seen) == 2


class Saves:
    """Counts its turns, and fails once in the third."""

    def __init__(self) -> None:
        self.turns, self.failed, self.loaded = dict[str, int](), set[str](), list[int]()

    async def play(self, episode: Episode) -> float:
        for turn in range(self.turns.setdefault(episode.name, 0), 4):
            self.turns[episode.name] = turn
            await episode.generate(max_new_tokens=1)
            if turn == 2 and episode.name not in self.failed:
                self.failed.add(episode.name)
                raise SandboxFailed("gone")
            episode.add_text("q")
        return 1.0

    def save(self, episode: Episode) -> int:
        return self.turns[episode.name]

    def load(self, episode: Episode, state: int) -> None:
        self.loaded.append(state)
        self.turns[episode.name] = state


def test_a_retry_and_a_journal_give_an_environment_its_saved_state() -> None:
    saves, engine = Saves(), TalkingEngine(TOKENIZER, "ab")
    [sample] = play(saves, engine)
    assert (sample.failure, sample.retries, len(sample.turns), saves.loaded) == (None, 1, 4, [2])
    assert len(engine.seen) == 4, "no turn was generated twice"
    journal = hosting._Turns()
    play(Saves(), RecoveringEngine(engine, journal))
    assert len(journal.records) == 4 and all(record.saved is not None for record in journal.records)
    after, died = Saves(), RecoveringEngine(TalkingEngine(TOKENIZER, "zz"), None, journal.records[:3])
    [again] = play(after, died)
    assert after.loaded[0] == 2 and again.input_ids[:6].tolist() == sample.input_ids[:6].tolist()


def test_more_rows_than_allowed_are_a_limit_or_left_out() -> None:
    async def rewrites(episode: Episode) -> float:
        for text in ("q", "qq"):
            completion, said = await episode.sample_turn(TOKENIZER(text)["input_ids"], 4)
            episode.record(Transcript(TOKENIZER(text)["input_ids"]), completion, said)
        return 1.0

    [sample] = play(rewrites)
    assert sample.failure == "limit" and "2 rows, more than environment.max_rows=1" in sample.error
    [sample] = play(rewrites, limit="partial")
    assert sample.failure is None and not sample.more_rows and sample.rewards == {"reward": 1.0}
    assert [turn.row for turn in sample.turns] == [0], "turns of rows that are left out"


def test_a_failure_can_stop_the_run() -> None:
    words = r"environment.on_failure.sandbox=stop: prompt 'p': SandboxFailed: gone \(test_failures.py line \d+\)"
    with pytest.raises(FailureStopsRun, match=words) as raised:
        play(Moody(SandboxFailed("gone")), n=4, sandbox="stop")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


# ---------------------------------------------------------------- rows, reports and samples


def roll_out(environment: Any, rubric: Rubric, tmp_path: Path, **treatments: Any) -> Any:
    on_failure, client = OnFailure(**treatments), FakeClient()
    host = EpisodeHost(environment, EnvironmentConfig(on_failure=on_failure))
    file = SampleFile(str(tmp_path / "samples.jsonl"), SamplesConfig(every=1, groups=4), prompts_per_step=4)
    rollouts = worker(
        TalkingEngine(TOKENIZER, "ab"), TOKENIZER, client, rubric, environment=host, samples=file,
        on_failure=on_failure, retries=2,
    )  # fmt: skip
    report = asyncio.run(rollouts.rollout(range(2), "train", SamplingParams(n=2, max_new_tokens=12)))
    return report, client, read_samples(file.path)


def test_a_zero_is_trained_on_counted_and_shown(tmp_path: Path) -> None:
    async def half(episode: Episode) -> float:
        await episode.generate(max_new_tokens=2)
        if episode.index:
            raise LimitExceeded("too many steps")
        return 1.0

    rubric = Rubric([("environment", EnvironmentReward(), 1.0)])
    report, client, shown = roll_out(half, rubric, tmp_path, limit="zero")
    assert (report.rows, report.failed, report.failures) == (4, 0, {"limit": 2})
    assert report.reward_sum == 2.0 and "too many steps" in report.first_error
    for keys, batch, tags in client.puts:
        assert tags["valid"].tolist() == [1.0] * len(keys)
        assert tags["reward"].tolist() == [float(key.endswith(".0")) for key in keys]
        assert int(batch.jagged("response_mask").values.sum()) == 2 * len(keys)
    failed = [row for row in shown if row["error"]]
    assert len(failed) == 2 and all((row["failure"], row["reward"]) == ("limit", 0.0) for row in failed)
    report, client, shown = roll_out(half, rubric, tmp_path / "masked")
    assert (report.failed, report.failures) == (2, {"limit": 2})


def test_a_judge_that_failed_is_asked_again_about_the_whole_prompt(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    async def fine(episode: Episode) -> None:
        await episode.generate(max_new_tokens=2)

    def judge(prompt: Prompt, response: str, finish_reason: str) -> float:
        asked[prompt.uid] += 1
        if prompt.uid == "1" and asked["1"] < 4:
            raise TimeoutError("busy")
        return 1.0

    rubric = Rubric([("judge", judge, 1.0)])
    report, *_ = roll_out(fine, rubric, tmp_path, judge="retry")
    assert (report.failed, report.failures, asked) == (0, {}, {"0": 2, "1": 6})
    asked.clear()
    report, _, shown = roll_out(fine, rubric, tmp_path / "masked")
    assert (report.failed, report.failures) == (2, {"judge": 2})
    with pytest.raises(FailureStopsRun, match=r"environment.on_failure.judge=stop: reward 'judge' raised TimeoutError"):
        asked.clear()
        roll_out(fine, rubric, tmp_path / "stopped", judge="stop")


def dies(arguments: str) -> str:
    os._exit(3)


@pytest.mark.processes
def test_a_tools_process_that_dies_is_a_failed_sandbox() -> None:
    tools = ToolUse(tools=[f"{__name__}:dies"], runs="process")

    async def main() -> None:
        try:
            with pytest.raises(SandboxFailed, match="tool 'dies': the process of 'dies' died"):
                await tools._answer("dies", "now")
        finally:
            await tools.close()

    asyncio.run(main())


# ---------------------------------------------------------------- the configuration


def test_the_former_key_is_named_and_an_old_run_keeps_its_journal() -> None:
    mine: dict[str, Any] = {"kind": "headrace.tests.actors.environments.test_failures:hides_errors"}
    with pytest.raises(ConfigError, match=r"environment.on_timeout: got 'partial', expected the key environment.on_fa"):
        build_config({"environment": {**mine, "on_timeout": "partial"}})
    old = build_config({"environment": {**mine, "on_timeout": "partial"}}, of_old_run=True)
    assert old.environment.on_failure == OnFailure(limit="partial")
    for given, late in ((old.environment, "partial"), (EnvironmentConfig(**mine), "fail")):
        text = fingerprint(old.model_copy(update={"environment": given}))
        assert f'"on_timeout": "{late}"' in text and "on_failure" not in text and "retries" not in text
    other = EnvironmentConfig(**mine, on_failure=OnFailure(sandbox="zero"))
    assert '"sandbox": "zero"' in fingerprint(old.model_copy(update={"environment": other}))
