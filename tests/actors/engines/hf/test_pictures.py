"""Tests that the engine reports for prompts with pictures the log-probs that plain transformers gives their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.codecs.blobs import Blob, blob_field
from headrace.codecs.schema import Field, Kind
from headrace.tests.trainers.backends.vision.tiny_vlms import (
    IMAGE,
    MODELS,
    TWIN,
    Picture,
    PlainVlm,
    Shown,
    save_vlm,
    shown_rows,
)

PARAMS = SamplingParams(n=2, temperature=1.0, max_new_tokens=6)


def blob(one: Picture) -> Blob:
    parts = [Field(name, Kind.RAGGED, part.dtype, ndim=part.ndim) for name, part in one.parts.items()]
    field = blob_field("images", [*parts, Field("num_tokens", Kind.PER_SAMPLE, torch.int32)])
    return Blob(field, {**one.parts, "num_tokens": torch.tensor(one.num_tokens, dtype=torch.int32)})


async def answers(folder: str, prompts: Sequence[np.ndarray], shown: Shown) -> list[list[Completion]]:
    """Return the completions of prompts that are decoded together, and check that a wrong prompt is refused."""
    engine = HfEngine(folder)
    try:
        with pytest.raises(ValueError, match="request 'wrong': prompt 0 has 0 placeholders of pictures, expected "):
            await engine.generate("wrong", [3, 4], replace(PARAMS, pictures=(blob(shown.pictures[0][0]),)))
        calls = [
            engine.generate(
                f"r{index}", prompt.tolist(), replace(PARAMS, pictures=tuple(map(blob, shown.pictures[index])))
            )
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)
    finally:
        await engine.close()


@pytest.mark.parametrize("name", list(MODELS))
def test_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts with one picture, two and none share a batch, padded on the left."""
    folder, shown = save_vlm(tmp_path / name, name), shown_rows(name)
    prompts = [row.ids[row.mask == 0] for row in shown.rows]
    found = asyncio.run(answers(folder, prompts, shown))
    rows: list[Any] = []
    pictures: list[list[Picture]] = []
    logprobs: list[np.ndarray] = []
    for index, completions in enumerate(found):
        for one in completions:
            if IMAGE in one.token_ids:  # The row cannot be computed at once with its pictures.
                continue
            rows.append(replace(shown.rows[index], ids=np.concatenate([prompts[index], one.token_ids])))
            pictures.append(shown.pictures[index])
            logprobs.append(one.logprobs)
    assert len(rows) >= len(prompts)
    plain = PlainVlm(folder, Shown(rows, pictures))
    with torch.no_grad():
        errors = [
            np.abs(plain.row_logprobs(row, 1.0).numpy()[-len(own) :] - own).max()
            for row, own in zip(rows, logprobs, strict=True)
        ]
    assert max(errors) <= 1e-5


async def turns(engine: Any, prompts: Sequence[np.ndarray], shown: Shown) -> list[tuple[Completion, Completion]]:
    """Return answers to prompts in which the policy has sampled a placeholder, and to those with its twin there."""
    found = []
    for index, own in enumerate(shown.pictures[:3]):
        # An earlier turn is before the pictures, between two of them, and at the end.
        prompt = np.concatenate([prompts[3], [0], prompts[index], [0], prompts[0], [0]])
        places = tuple(np.flatnonzero(prompt == 0).tolist())
        params = replace(PARAMS, n=1, seed=1, pictures=tuple(map(blob, [*own, *shown.pictures[0]])))
        both = []
        for token, given in ((IMAGE, replace(params, own_places=places)), (TWIN, params)):
            ids = np.where(prompt == 0, token, prompt).tolist()
            both += await engine.generate(f"turn {index}", ids, given)
            with pytest.raises(ValueError, match=r"placeholders of pictures, expected"):
                await engine.generate("more", [*ids, IMAGE], given)
        found.append((both[0], both[1]))
    return found


def expect_twins(found: Sequence[tuple[Completion, Completion]]) -> None:
    for one, twin in found:
        assert one.token_ids.tolist() == twin.token_ids.tolist() and len(one.token_ids)
        assert np.abs(one.logprobs - twin.logprobs).max() < 1e-5


@pytest.mark.parametrize("name", list(MODELS))
def test_a_placeholder_that_was_sampled_in_an_earlier_turn_stands_for_itself(name: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = HfEngine(save_vlm(tmp_path / name, name, twins=True))
        try:
            expect_twins(await turns(engine, prompts, shown))
        finally:
            await engine.close()

    shown = shown_rows(name)
    prompts = [row.ids[row.mask == 0] for row in shown.rows]
    asyncio.run(run())
