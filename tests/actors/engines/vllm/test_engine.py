"""Tests of the vllm engine's samples: log-probs against a forward pass, seeds, stops, prefixes and refused requests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.tests.actors.conftest import save_tokenizer
from headrace.tests.actors.engines.vllm.builder import CONTEXT, EOS, VOCAB_SIZE, build, save_model
from headrace.tests.actors.engines.vllm.conftest import Subject

pytestmark = pytest.mark.vllm
SUBJECT = ("untied", 1)
PROMPTS = [[5, 6, 7, 13], [4], [9, 9, 3, 3, 8, 13], [5 + i % 30 for i in range(300)]]


async def answers(subject: Subject, params: SamplingParams, tag: str = "p") -> list[list[Completion]]:
    engine = subject.engine
    return await asyncio.gather(*(engine.generate(f"{tag}{i}", prompt, params) for i, prompt in enumerate(PROMPTS)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, max_new_tokens=24),
        SamplingParams(n=4, max_new_tokens=24, temperature=0.5),
        SamplingParams(n=4, max_new_tokens=24, temperature=0.8, top_k=5),
        SamplingParams(n=4, max_new_tokens=24, top_p=0.7),
        SamplingParams(n=4, max_new_tokens=24, temperature=1.3, top_k=9, top_p=0.8),
        SamplingParams(n=2, max_new_tokens=24, temperature=0.0),
    ],
    ids=["plain", "cold", "top-k", "top-p", "all", "greedy"],
)
def test_logprobs_are_of_the_distribution_sampled_from(subject: Subject, params: SamplingParams) -> None:
    for prompt, completions in zip(PROMPTS, subject.run(answers(subject, params)), strict=True):
        assert len(completions) == params.n
        subject.expect_logprobs(prompt, completions, params)
        for one in completions:
            assert (one.finish_reason == "stop") == (one.token_ids[-1] == EOS)
            assert (one.finish_reason == "length") == (len(one.token_ids) == 24 and one.token_ids[-1] != EOS)
            assert EOS not in one.token_ids[:-1]


def test_scores_of_given_tokens_are_those_of_transformers(subject: Subject) -> None:
    """Also of a long row, whose prompt vLLM computes in parts, and of rows that share a prefix."""
    rows = [np.array(ids, np.int32) for ids in (PROMPTS[3], PROMPTS[3][:200], [5, 6, 7], [4, EOS, 9])]
    wanted = [np.arange(len(row)) % 3 > 0 for row in rows]
    masks = [mask.astype(np.uint8) for mask in wanted]
    for k in (4, 0):
        found = subject.run(subject.engine.score(rows, masks, k, 1.0))
        for row, mask, (logprobs, ids, values) in zip(rows, wanted, found, strict=True):
            with torch.no_grad():
                logits = subject.model(torch.from_numpy(row).long()[None]).logits[0]
            every = torch.log_softmax(logits, -1)[np.flatnonzero(mask) - 1]
            own = every.gather(-1, torch.from_numpy(row[mask]).long()[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, own, atol=1e-5)
            np.testing.assert_allclose(values, every.topk(k, -1).values, atol=1e-5)
            np.testing.assert_allclose(every.gather(-1, torch.from_numpy(ids).long()), values, atol=1e-5)
    for row, temperature, words in (
        (rows[2], 0.7, "got the temperature 0.7, expected 1"),
        (np.ones(CONTEXT, np.int32), 1.0, f"with {CONTEXT} tokens, expected at most {CONTEXT - 1}"),
        (np.array([1, VOCAB_SIZE], np.int32), 1.0, "does the model have the policy's vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            subject.run(subject.engine.score([row], [np.ones(len(row), np.uint8)], 0, temperature))


def test_different_parameters_share_a_batch(subject: Subject) -> None:
    async def main() -> None:
        hot, cold = SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, temperature=0.0)
        both = await asyncio.gather(answers(subject, hot, "hot"), answers(subject, cold, "cold"))
        for params, found in zip((hot, cold), both, strict=True):
            for prompt, completions in zip(PROMPTS, found, strict=True):
                subject.expect_logprobs(prompt, completions, params)

    subject.run(main())


def test_greedy_equals_transformers_generate(subject: Subject) -> None:
    found = subject.run(answers(subject, SamplingParams(max_new_tokens=12, temperature=0.0)))
    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        expected = subject.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_forgetting_prefixes_harms_no_request(subject: Subject) -> None:
    async def main() -> None:
        params = SamplingParams(n=8, max_new_tokens=48, seed=1)
        alone = await subject.engine.generate("running", PROMPTS[0], params)
        running = asyncio.create_task(subject.engine.generate("running", PROMPTS[0], params))
        while not any(length for _, length in subject.engine.tokens_of_newest()):
            await asyncio.sleep(0)
        await subject.engine.reset_prefix_cache()
        for one, again in zip(alone, await running, strict=True):
            assert one.token_ids.tolist() == again.token_ids.tolist()

    subject.run(main())


def test_a_sample_does_not_depend_on_what_else_runs(subject: Subject) -> None:
    async def main() -> None:
        params = SamplingParams(n=3, max_new_tokens=20)
        together = await answers(subject, params)
        for index, prompt in enumerate(PROMPTS):
            alone = await subject.engine.generate(f"p{index}", prompt, params)
            assert [one.token_ids.tolist() for one in alone] == [one.token_ids.tolist() for one in together[index]]
        assert len({tuple(one.token_ids) for one in together[0]}) > 1, "samples share their random numbers"
        seeded = await answers(subject, SamplingParams(n=3, max_new_tokens=20, seed=7))
        assert [one.token_ids.tolist() for one in seeded[0]] != [one.token_ids.tolist() for one in together[0]]

    subject.run(main())


def test_vllm_gets_the_tokenizer_with_the_first_stop_text(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.actors.engines.vllm import library  # imported by the engine by now

    save_tokenizer(Path(subject.model_folder))
    tokenizer = AutoTokenizer.from_pretrained(subject.model_folder)
    outputs, load, loads = subject.engine.process.llm.output_processor, library.load_tokenizer, []

    def refuse(llm: library.AsyncLLM) -> None:
        raise OSError("there is no tokenizer.json")

    def counted(llm: library.AsyncLLM) -> None:
        loads.append(llm)
        load(llm)

    async def main() -> None:
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        [[plain], *_] = await answers(subject, params)
        assert outputs.tokenizer is None, "it takes seconds, and nothing has needed it"
        wanted = plain.token_ids.tolist()
        stop = next(token for token in wanted if token != wanted[0])
        ending = dataclasses.replace(params, stop=(tokenizer.decode([stop]),))
        with pytest.raises(ValueError, match="stop: got .*, expected none, because the model has no tokenizer"):
            await answers(subject, ending, "early")
        subject.engine._checks._tokenizer = tokenizer  # as if it had been there at the start
        monkeypatch.setattr(library, "load_tokenizer", refuse)
        with pytest.raises(ValueError, match="'refused0': stop texts need the model's tokenizer.*no tokenizer.json"):
            await answers(subject, ending, "refused")
        monkeypatch.setattr(library, "load_tokenizer", counted)
        [[ended], *_] = await answers(subject, ending, "ended")
        assert ended.token_ids.tolist() == wanted[: wanted.index(stop) + 1]
        assert ended.finish_reason == "stop" and len(loads) == 1

    subject.run(main())


def test_more_tokens_than_a_step_takes(subject: Subject) -> None:
    """Seeded prompts of 3600 tokens at once, 2048 a step: none of them is cut in two, which would end the engine."""
    params = SamplingParams(max_new_tokens=4, seed=3)
    prompts = [[(start + step) % 30 + 5 for step in range(400)] for start in range(9)]

    async def main() -> None:
        calls = [subject.engine.generate(f"long{number}", prompt, params) for number, prompt in enumerate(prompts)]
        for prompt, found in zip(prompts, await asyncio.gather(*calls), strict=True):
            subject.expect_logprobs(prompt, found, params)

    subject.run(main())


def test_prompts_that_do_not_fit(subject: Subject) -> None:
    for prompt, params, message in (
        ([], SamplingParams(), "no tokens"),
        ([5] * CONTEXT, SamplingParams(max_new_tokens=5), "512 prompt tokens . 5 new tokens exceed .* context of 512"),
        ([5, VOCAB_SIZE], SamplingParams(), f"token ids 5..{VOCAB_SIZE}, expected 0..{VOCAB_SIZE - 1}"),
        ([5], SamplingParams(temperature=0.001), "expected 0 .greedy. or at least 0.01"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.run(subject.engine.generate("x", prompt, params))
    full = SamplingParams(max_new_tokens=1)
    (one,) = subject.run(subject.engine.generate("full", [5] * (CONTEXT - 1), full))
    assert len(one.token_ids) == 1


def test_an_aborted_request_keeps_what_it_has(subject: Subject) -> None:
    async def main() -> None:
        # Greedy under these weights: 400 tokens without an end, and so an abort is what ends it.
        running = asyncio.create_task(
            subject.engine.generate("long", PROMPTS[0], SamplingParams(n=2, max_new_tokens=400, temperature=0.0))
        )
        while not all(count for _, count in subject.engine.tokens_of_newest() or [(-1, 0)]):
            await asyncio.sleep(0.01)
        await subject.engine.abort("long")
        partial = await running
        assert [one.finish_reason for one in partial] == ["abort", "abort"]
        assert all(0 < len(one.token_ids) == len(one.logprobs) == len(one.versions) < 400 for one in partial)
        subject.expect_logprobs(PROMPTS[0], partial)

    subject.run(main())


def test_cached_prefixes_of_old_weights_are_not_used(subject: Subject) -> None:
    """Also while requests run that are kept: theirs are recomputed, too."""

    async def main() -> None:
        engine, prompt, params = subject.engine, PROMPTS[3], SamplingParams(max_new_tokens=8)
        await engine.generate("warm", prompt, params)
        old = engine.version
        await engine.prepare_weights(subject.update(scale=0.1))
        kept = asyncio.create_task(engine.generate("kept", prompt, SamplingParams(n=4, max_new_tokens=200)))
        await asyncio.sleep(0.05)
        report = await engine.commit_weights(old + 1, "keep")
        assert report.kept == 1
        subject.expect_logprobs(prompt, await engine.generate("after", prompt, params))
        for one in await kept:
            new = one.versions == old + 1
            expected = subject.logprobs(prompt, one.token_ids, SamplingParams())
            np.testing.assert_allclose(one.logprobs[new], expected[new], atol=1e-3)

    subject.run(main())


def test_models_that_cannot_run_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path: got .*missing.*, expected a folder that exists"):
        build(str(tmp_path / "missing"))
    folder = Path(save_model(tmp_path / "odd", "untied"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 32', '"head_dim": 16'))
    with pytest.raises(ValueError, match="attention heads have size 16, but vLLM has CPU kernels only for 32, 64"):
        build(str(folder))


def test_an_engine_leaves_its_host_process_alone(subject: Subject) -> None:
    before = dict(os.environ), random.getstate(), torch.random.get_rng_state(), str(np.random.get_state())
    with pytest.raises(ValueError, match="vLLM does not run"):
        build(subject.model_folder, tp=3)  # the model has two heads
    assert (dict(os.environ), random.getstate(), str(np.random.get_state())) == (before[0], before[1], before[3])
    assert torch.equal(torch.random.get_rng_state(), before[2])
