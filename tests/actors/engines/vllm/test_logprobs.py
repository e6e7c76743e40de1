"""Tests of log-probs that the worker keeps: the same bits as vLLM's own, for both of vLLM's model runners."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.tests.actors.engines.vllm.conftest import Subject

pytestmark = pytest.mark.vllm
SUBJECT = ("untied", 1)
PROMPT = [5, 6, 7, 13]


def module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return importlib.import_module(f"headrace.actors.engines.vllm.{name}")


async def both_ways(subject: Subject, name: str, params: SamplingParams) -> None:
    """Have vLLM return log-probs of requests that the worker keeps, too, and compare all bits."""
    engine = subject.engine
    assert await engine._logprobs.keeps() and engine.logprob_way == "auto"

    async def one(sample: str, sampling: Any) -> int:
        final: Any = None
        async for output in engine.process.generate(sample, PROMPT, sampling):
            final = output.outputs[0]
        theirs = np.array(final.logprobs.logprobs, np.float32)
        ours = (await engine._logprobs.take(sample, len(final.token_ids))).logprobs
        assert ours.dtype == np.float32 and ours.tobytes() == theirs.tobytes(), (ours, theirs)
        return len(ours)

    sampling = engine._checks.sampling(name, params, with_logprobs=True)
    lengths = await asyncio.gather(*(one(f"{name}#{number}", each) for number, each in enumerate(sampling)))
    assert sum(lengths) > params.n


def test_kept_logprobs_are_vllms_bit_by_bit(subject: Subject) -> None:
    async def main() -> None:
        greedy = SamplingParams(n=2, max_new_tokens=30, temperature=0.0)
        await both_ways(subject, "greedy", greedy)  # all greedy: vLLM's sampler computes no log-probs of its own
        await asyncio.gather(
            both_ways(subject, "cold", greedy),
            both_ways(subject, "hot", SamplingParams(n=5, max_new_tokens=40)),
            both_ways(subject, "cut", SamplingParams(n=3, max_new_tokens=20, temperature=0.7, top_k=5, top_p=0.9)),
        )

    subject.run(main())


def test_requests_that_are_computed_again_keep_each_logprob_once(subject: Subject) -> None:
    async def main() -> None:
        running = asyncio.create_task(both_ways(subject, "again", SamplingParams(n=6, max_new_tokens=200)))
        for _ in range(3):
            await asyncio.sleep(0.05)
            await subject.engine.reset_prefix_cache()
        await running

    subject.run(main())


def test_the_way_can_be_changed_and_samples_that_nobody_takes_are_forgotten(subject: Subject) -> None:
    async def main() -> None:
        engine, params = subject.engine, SamplingParams(n=2, max_new_tokens=8, seed=5)
        ours = await engine.generate("way", PROMPT, params)
        await engine.change_logprobs("vllm")
        assert engine.logprob_way == "vllm"
        theirs = await engine.generate("way", PROMPT, params)
        await engine.change_logprobs("auto")
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
        running = asyncio.create_task(engine.generate("gone", PROMPT, SamplingParams(max_new_tokens=400)))
        while not any(count for _, count in engine.tokens_of_newest()):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.generate("next", PROMPT, params)
        with pytest.raises(RuntimeError, match="log-probs of 'gone#0': the worker has 0 of 1 tokens"):
            await engine._logprobs.take("gone#0", 1)

    subject.run(main())


def apply_top_k_top_p(logits: torch.Tensor, k: None, p: None) -> torch.Tensor:
    """The function of vLLM's second sampler that is replaced; no request here has a top-k or top-p."""
    return logits


class SecondSampler:
    """The part of the sampler of vLLM's second model runner that is used."""

    def add_request(self, index: int, prompt_len: int, sampling_params: Any) -> None:
        pass

    def sample(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens, apply_top_k_top_p(logits, None, None)


class SecondRunner:
    """What of vLLM's second model runner is used: three request slots, tokens known by their number."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            index_to_req_id={}, prompt_len=SimpleNamespace(np=np.zeros(3, np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(3, np.int32)),
        )  # fmt: skip
        self.sampler = SecondSampler()

    def add(self, slot: int, request: str, prompt: int, prefill: int, width: int = 0) -> None:
        extra = {module("logprobs").SET_WIDTH: width} if width else None
        self.sampler.add_request(slot, prompt, SimpleNamespace(extra_args=extra))
        self.req_states.index_to_req_id[slot] = request
        self.req_states.prompt_len.np[slot], self.req_states.prefill_len.np[slot] = prompt, prefill

    def sample(self, hidden: torch.Tensor, batch: Any) -> Any:
        return self.sampler.sample(hidden, batch.tokens)

    def step(self, slots: Sequence[int], seq_lens: Sequence[int], logits: torch.Tensor, tokens: Sequence[int]) -> None:
        lengths = torch.tensor([*seq_lens, 0], dtype=torch.int32)  # vLLM pads batches
        batch = SimpleNamespace(idx_mapping_np=np.array(slots), seq_lens=lengths, tokens=torch.tensor(tokens))
        self.sample(logits, batch)
        lengths.zero_()  # vLLM's next step writes into the same memory


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def test_the_second_runners_sets_are_cut_at_each_requests_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("library"), "token_logprobs", token_logprobs)
    runner = SecondRunner()
    kept = module("logprobs").SampledLogprobs(runner)
    for slot, width in enumerate((2, 3, 0)):
        runner.add(slot, f"{slot}-12345678", 4, 4, width)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(3, 1)
    runner.step([2, 0, 1], [4, 4, 4], logits, [0, 1, 3])
    runner.step([0], [5], logits[:1].clone().masked_fill_(torch.tensor([True, True, False, True]), -torch.inf), [2])
    taken = kept.take(["0", "1", "2"], [2, 1, 1])
    own = [one.tolist() for one in (taken.counts, taken.ids)]
    assert own == [[2, 1, 3, 0], [1, 3, 2, 1, 2, 3]]
    scores = [[3.0, 2.0], [0.0], [2.0, 3.0, 1.0], [0.0, 3.0, 1.0, 2.0]]
    np.testing.assert_allclose(taken.logprobs, [torch.tensor(one).log_softmax(0)[0].item() for one in scores])
    kept.close()
    assert apply_top_k_top_p(logits, None, None) is logits and not vars(runner.sampler)


def test_the_second_runners_tokens_are_placed_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("library"), "token_logprobs", token_logprobs)
    runner, generator = SecondRunner(), torch.Generator().manual_seed(0)
    kept = module("logprobs").SampledLogprobs(runner)
    runner.add(0, "a-12345678", 4, 4)
    runner.add(2, "b-12345678", 6, 6)
    steps = [torch.randn(2, 9, generator=generator) for _ in range(4)]
    runner.step([2, 0], [4, 4], steps[0], [1, 2])  # "b" has read 4 of its 6 prompt tokens: its token is none
    runner.step([2, 0], [6, 5], steps[1], [3, 4])
    runner.step([2, 0], [7, 6], steps[2], [5, 6])
    runner.add(2, "b-12345678", 6, 7)  # preempted; its second token was dropped on the way, and is sampled again
    runner.step([0, 2], [7, 7], steps[3], [7, 8])
    runner.sampler.sample(steps[0], torch.tensor([0, 0]))  # vLLM tries its sampler out

    def expected(*places: tuple[int, int, int]) -> list[float]:
        return [float(steps[step][row].log_softmax(-1)[token]) for step, row, token in places]

    np.testing.assert_allclose(
        kept.take(["b", "a", "unknown"], [2, 3, 0]).logprobs,
        expected((1, 0, 3), (3, 1, 8), (0, 1, 2), (1, 1, 4), (2, 1, 6)),
    )
    assert not kept._rows and not kept._ids and not kept._steps, "what was taken is forgotten"
    runner.step([0, 2], [8, 8], steps[3], [7, 8])
    with pytest.raises(ValueError, match="log-probs of 'c': the worker has 0 of 2 tokens"):
        kept.take(["c"], [2])
    assert np.isnan(kept.take(["a"], [4]).logprobs[:-1]).all(), (
        "places before the first token that was kept have no log-prob"
    )
    kept.close()
    assert "sample" not in vars(runner)


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(ValueError, match="got vLLM's model runner SimpleNamespace, expected one with"):
        module("logprobs").SampledLogprobs(SimpleNamespace())


@pytest.mark.slow
def test_drafted_tokens_have_the_policys_logprobs_and_are_counted(tmp_path: Path) -> None:
    """A random model repeats itself when it is greedy, so that drafts from its own text are accepted."""

    class Drafting(Subject):
        build_options = {
            "options": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
        }

    subject = Drafting(tmp_path, "untied")
    try:
        for params in (SamplingParams(max_new_tokens=120, temperature=0.0), SamplingParams(n=4, max_new_tokens=60)):
            completions = subject.run(subject.engine.generate(f"draft {params.n}", PROMPT, params))
            subject.expect_logprobs(PROMPT, completions, params)
        stats = subject.engine.stats
        assert 0 < stats.accepted_tokens < stats.tokens and stats.drafts + stats.accepted_tokens >= stats.tokens
        with pytest.raises(ValueError, match="rollout.mask_limit: got 9, expected 0, because log-probs come in vLLM's"):
            subject.run(subject.engine.generate("cut", PROMPT, SamplingParams(top_k=3, mask_limit=9)))
    finally:
        subject.close()
