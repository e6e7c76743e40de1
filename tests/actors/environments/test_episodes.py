"""Episodes of users' environments: exact tokens, chat, time limits, failures, places, and rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.actors.engines.chat import TemplateFormat, build_chat_format
from headrace.actors.engines.protocol import EngineDied, SamplingParams
from headrace.actors.engines.router import Router
from headrace.actors.environments import host as hosting
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig, OnFailure
from headrace.actors.environments.episode import Clock, Episode
from headrace.actors.environments.factory import build_environment, check_environment
from headrace.actors.environments.host import EpisodeHost, Gate
from headrace.actors.process.user_function_timeouts import MAX_HUNG, TooManyHang
from headrace.actors.protocols import Prompt, Sample
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()
END: Any = TOKENIZER.eos_token_id
DEFAULTS = EnvironmentConfig()


def play(
    environment: Any,
    engine: Any,
    *,
    n: int = 1,
    config: EnvironmentConfig = DEFAULTS,
    text: str = "q",
    most: int = 4000,
    chat: Callable[[], Any] | None = None,
) -> list[Sample]:
    host = EpisodeHost(environment, config, chat=chat)
    prompt = Prompt("p", text, "", {})
    return asyncio.run(host.run(prompt, engine, TOKENIZER, SamplingParams(n=n, max_new_tokens=most)))


# ---------------------------------------------------------------- exact tokens


async def ten_questions(episode: Episode) -> float:
    for number in range(10):
        reply = await episode.say([{"role": "user", "content": f"ab {number}?"}])
        assert reply.content == "ab ab"
    return 0.5


@pytest.mark.parametrize("renderer", ["template", "qwen3"])
def test_ten_turns_of_chat_are_one_row_of_exactly_the_tokens_that_the_engine_saw(renderer: str) -> None:
    if renderer != "template":
        pytest.importorskip("renderers")
    engine = TalkingEngine(TOKENIZER, "ab ab", version=4)
    [sample] = play(ten_questions, engine, chat=lambda: build_chat_format(TOKENIZER, renderer, {}, {}))
    assert not sample.error and sample.rewards == {"reward": 0.5} and not sample.more_rows
    assert len(sample.turns) == len(engine.seen) == 10
    row = sample.input_ids.tolist()
    for turn, (request_id, prompt_ids, answer_ids) in zip(sample.turns, engine.seen, strict=True):
        assert row[: turn.start] == prompt_ids, "each prompt is the row so far"
        assert row[turn.start : turn.start + turn.num_tokens] == answer_ids
        assert request_id.startswith("p.0/")
    _, prompt_ids, answer_ids = engine.seen[-1]
    assert row == [*prompt_ids, *answer_ids]
    assert int(sample.response_mask.sum()) == sum(len(answer) for *_, answer in engine.seen)
    chosen = sample.response_mask == 1
    assert (sample.versions[chosen] == 4).all() and (sample.versions[~chosen] == -1).all()
    assert (sample.logprobs[chosen] == -1.0).all() and (sample.logprobs[~chosen] == 0.0).all()
    text = TOKENIZER.decode(row, skip_special_tokens=False)
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"] != row, "encoding again would change the tokens"


def test_a_template_continues_a_turn_that_was_cut_off_and_refuses_one_that_it_would_change() -> None:
    chat = TemplateFormat(TOKENIZER, {})
    prompt = chat.render([{"role": "user", "content": "hi"}])
    cut = TOKENIZER("he", add_special_tokens=False)["input_ids"]
    more = [{"role": "user", "content": "go"}]
    tail = "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    for answer, added in ((cut, tail), ([*cut, END], tail.removeprefix("<|im_end|>"))):
        whole = chat.extend(prompt, answer, more)
        assert whole is not None and whole[: len(prompt) + len(answer)] == [*prompt, *answer]
        assert TOKENIZER.decode(whole[len(prompt) + len(answer) :]) == added
    assert chat.extend(prompt, cut, [{"role": "assistant", "content": "x"}]) is None
    forgetful = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert TemplateFormat(make_chat_tokenizer(forgetful), {}).extend(prompt, cut, more) is None
    answer = TOKENIZER("<think>\nhm\n</think>\n\nyes", add_special_tokens=False)["input_ids"]
    assert (chat.parse([*answer, END]).content, chat.parse([*answer, END]).reasoning) == ("yes", "hm")


def test_a_text_that_is_added_is_masked_and_earlier_tokens_stay() -> None:
    async def guess(episode: Episode) -> None:
        first = await episode.generate(max_new_tokens=2)
        assert (first.text, first.finish_reason) == ("ab", "length")
        episode.add_text("ab")
        await episode.generate(stop=("b",))
        episode.reward(1, "tries")
        episode.answer = "mine"

    engine = TalkingEngine(TOKENIZER, "abc", "xbz")
    [sample] = play(guess, engine)
    a, b, ab = (TOKENIZER.convert_tokens_to_ids(token) for token in ("a", "b", "ab"))
    q, x = TOKENIZER("q")["input_ids"][0], TOKENIZER("x")["input_ids"][0]
    assert sample.input_ids.tolist() == [q, a, b, ab, x, b]
    assert sample.response_mask.tolist() == [0, 1, 1, 0, 1, 1]
    assert (sample.text, sample.finish_reason, sample.rewards) == ("mine", "stop", {"tries": 1.0})


def test_a_row_has_no_more_tokens_than_the_run_allows() -> None:
    async def chatter(episode: Episode) -> float:
        while True:
            await episode.generate()
            episode.reward(len(episode.turns))

    [sample] = play(chatter, TalkingEngine(TOKENIZER, "abcd"), most=12)
    assert sample.finish_reason == "length" and not sample.error and len(sample.input_ids) == 13
    assert sample.rewards == {"reward": 3.0}, "what it had when the tokens ran out"


# ---------------------------------------------------------------- failures


def test_an_error_and_a_hang_cost_their_own_episodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "GRACE_S", 0.05)

    async def moody(episode: Episode) -> float:
        await episode.generate()
        if episode.index == 0:
            raise RuntimeError("the sandbox\nis gone")
        if episode.index == 1:
            await asyncio.sleep(3600)
        if episode.index == 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.3)  # longer than it is waited for
        return float("nan") if episode.index == 3 else 1.0

    config = EnvironmentConfig(turn_timeout_s=0.2)
    samples = play(moody, TalkingEngine(TOKENIZER, "ab"), n=5, config=config)
    assert [sample.finish_reason for sample in samples] == ["error"] * 4 + ["stop"]
    assert "RuntimeError: the sandbox" in samples[0].error
    late = "TimeoutError: the environment took longer than environment.turn_timeout_s=0.2 s for one turn"
    assert [sample.error for sample in samples[1:3]] == [late, late]
    assert "expected a finite number" in samples[3].error and samples[4].rewards == {"reward": 1.0}
    assert all(len(sample.turns) == 1 for sample in samples)


def test_an_episode_out_of_time_may_keep_its_rewards() -> None:
    async def slow(episode: Episode) -> float:
        for _ in range(100):
            await episode.generate()
            episode.reward(len(episode.turns) / 10)
            await asyncio.sleep(0.06)
        return 1.0

    config = EnvironmentConfig(episode_timeout_s=0.2, on_failure=OnFailure(limit="partial"))
    [sample] = play(slow, TalkingEngine(TOKENIZER, "ab", latency_s=0.05), config=config)
    assert sample.finish_reason == "timeout" and not sample.error
    assert sample.rewards == {"reward": len(sample.turns) / 10} and 2 <= len(sample.turns) <= 5


def test_time_stands_still_while_the_policy_generates() -> None:
    clock = Clock(1.0, 1.5)
    with clock.stopped():
        time.sleep(0.03)
        with clock.stopped():
            pass
        assert clock.left_s > 0.9
    assert 0.99 < clock.left_s <= 1.0

    async def patient(episode: Episode) -> float:
        for _ in range(4):
            await episode.generate()
        return 1.0

    engine = TalkingEngine(TOKENIZER, "ab", latency_s=0.1)
    [sample] = play(patient, engine, config=EnvironmentConfig(episode_timeout_s=0.2))
    assert sample.rewards == {"reward": 1.0}


def test_an_engine_that_is_gone_ends_the_rollout_whatever_the_environment_makes_of_it() -> None:
    class Gone(TalkingEngine):
        async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
            raise EngineDied("engine 0 is gone")

    async def careless(episode: Episode) -> float:
        try:
            await episode.generate()
        except EngineDied:
            return 1.0
        return 0.0

    with pytest.raises(EngineDied):
        play(careless, Gone(TOKENIZER, "a"), n=3)


def test_too_many_hanging_episodes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "GRACE_S", 0.01)
    release = False

    async def stubborn(episode: Episode) -> None:
        while not release:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        nonlocal release
        host = EpisodeHost(stubborn, EnvironmentConfig(turn_timeout_s=0.01))
        engine, params = TalkingEngine(TOKENIZER, "a"), SamplingParams(n=MAX_HUNG)
        await host.run(Prompt("p", "q", "", {}), engine, TOKENIZER, params)
        with pytest.raises(TooManyHang, match="16 cancelled episodes have not ended"):
            await host.run(Prompt("p", "q", "", {}), engine, TOKENIZER, params)
        release = True
        await asyncio.sleep(0.1)
        assert not host._hung and host._gate.running == 0

    asyncio.run(main())


# ---------------------------------------------------------------- places


def test_so_many_episodes_run_at_once_and_fewer_when_engines_are_gone() -> None:
    async def main() -> None:
        router = Router(timeout_s=1)
        for name in ("a", "b"):
            router.add(name, TalkingEngine(TOKENIZER, "a"))
        gate, most, running = Gate(4), 0, 0

        async def one() -> None:
            nonlocal most, running
            async with gate.place(router):
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(0.002)
                finally:
                    running -= 1

        await asyncio.gather(*(one() for _ in range(20)))
        assert (most, gate.running) == (4, 0)
        router._exclude(router._members["a"], EngineDied("gone"))
        most = 0
        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0.001)
        for task in tasks[:15:3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, gate.running, running) == (2, 0, 0), "cancelled waits keep no place and lose none"
        await asyncio.gather(*(one() for _ in range(5)))

    asyncio.run(main())


# ---------------------------------------------------------------- the configuration


class Guess:
    def __init__(self, high: int = 10) -> None:
        self.high = high

    async def play(self, episode: Episode) -> float:
        return 1.0


def test_environments_by_path() -> None:
    here = __name__
    built = build_environment(EnvironmentConfig(kind=f"{here}:Guess", options={"high": 3}))
    assert isinstance(built, Guess) and built.high == 3
    plain = build_environment(EnvironmentConfig(kind=f"{here}:ten_questions"))
    assert plain.func is ten_questions or plain.func.__name__ == "ten_questions"
    for config, words in (
        (
            EnvironmentConfig(kind=f"{here}:Guess", options={"low": 1}),
            r"\['low'\], expected .*Guess' \(high\): unknown",
        ),
        (EnvironmentConfig(kind=f"{here}:Missing"), "has no 'Missing'"),
        (EnvironmentConfig(kind=f"{here}:END"), "expected a function or class"),
        (EnvironmentConfig(kind="tool_use", options={"max_turns": 0}), "max_turns: got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            check_environment(config, EndpointConfig())
    with pytest.raises(ValueError, match="expected an object with a coroutine"):
        build_environment(EnvironmentConfig(kind="textwrap:TextWrapper"))
    with pytest.raises(ValueError, match="expected single_turn, tool_use"):
        EnvironmentConfig(kind="guess")


def test_a_missing_or_wrong_renderer_is_named() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        TemplateFormat(make_chat_tokenizer(""), {})
    pytest.importorskip("renderers")
    with pytest.raises(ValueError, match="model.renderer: got 'qwen33'"):
        build_chat_format(TOKENIZER, "qwen33", {}, {})
