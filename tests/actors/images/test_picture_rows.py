"""Rows with pictures in the data plane: one block for each picture, and masked rows where tokens do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.preparation import PicturePool
from headrace.actors.images.processor import PictureProcessor, Processed
from headrace.actors.images.prompt_pictures import BadPicture, Picture
from headrace.actors.process.user_function_timeouts import plain_prompt
from headrace.actors.protocols import row_schema, written_fields
from headrace.actors.rewards.builtin import exact_match
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.journal import GroupJournal, JournalConfig
from headrace.actors.rollout.pictures.picture_rows import RowPictures
from headrace.actors.rollout.prompts import PromptStream, open_prompts
from headrace.actors.rollout.worker import RolloutWorker
from headrace.dataplane.factory import connect, connect_async
from headrace.testing.data_plane import open_plane
from headrace.tests.actors.images.tiny_vision import PAD, draw, encoded


class Inside(PicturePool):
    """A pool that works in this process, because a process of its own takes seconds to start."""

    async def _run(self, data: bytes) -> Processed:
        return self.processor.process(data)


def stream(folder: Path, tokenizer: Any) -> PromptStream:
    """Four prompts: two with the same picture, one with two pictures, and one whose picture is damaged."""
    for name, seed in (("a", 0), ("b", 1)):
        (folder / f"{name}.png").write_bytes(encoded(draw(100, 60, seed)))
    (folder / "c.png").write_bytes(b"damaged")
    lines = [
        {"prompt": "count", "answer": "1", "images": [f"{one}.png" for one in names]} for names in ("a", "a", "ab", "c")
    ]
    (folder / "my.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = {"train": str(folder / "my.jsonl"), "chat_template": "all", "images": {"enabled": True}}
    data = DataConfig.model_validate(config)
    source = open_prompts(data, tokenizer, seed=0, check_lengths=True).source
    return PromptStream(source, shuffle=False)


def worker(prompts: PromptStream, folder: str, tokenizer: Any, handle: Any, journal: Any = None) -> RolloutWorker:
    pad = PictureProcessor(ImagesConfig(enabled=True), folder, tokenizer).token_ids[0]

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        return [6, pad] if sample == 1 and request_id.startswith("1") else [6, 7]

    return RolloutWorker(
        engine=ScriptedEngine(script, version=3),
        environment=EpisodeHost(SingleTurn()),
        tokenizer=tokenizer,
        rubric=Rubric([("exact_match", exact_match, 1.0)]),
        prompts=prompts,
        held_out={},
        client=connect_async(handle, name="rollout"),
        pictures=RowPictures(Inside(ImagesConfig(enabled=True), folder, folder, tokenizer), tokenizer, 24),
        journal=journal,
    )


def test_rows_refer_to_pictures_that_are_stored_once(tmp_path: Path, vision_folder: str, vision_tokenizer: Any) -> None:
    prompts = stream(tmp_path, vision_tokenizer)
    config = JournalConfig(str(tmp_path / "journal"), "one")

    async def run(handle: Any) -> Any:
        rollouts = worker(prompts, vision_folder, vision_tokenizer, handle, GroupJournal(config, "rollout 0"))
        report = await rollouts.rollout(range(4), "train", SamplingParams(n=2, max_new_tokens=2))
        assert rollouts._pictures is not None
        counts = rollouts._pictures.pool.counts
        await rollouts.close()
        return report, counts

    field = PictureProcessor(ImagesConfig(enabled=True), vision_folder, vision_tokenizer).field
    names = [*written_fields(None, (), field)]
    keys = [f"{prompt}.{sample}" for prompt in range(4) for sample in range(2)]
    for restored in (0, 6):
        with open_plane() as plane, connect(plane.handle) as client:
            client.register("train", row_schema(None, images=field), ["train"], group_size=2)
            report, counts = asyncio.run(run(plane.handle))
            assert (report.rows, report.failed, report.restored) == (8, 2, restored)
            assert counts.processed == 2 and report.pictures == counts
            meta = client.lookup("train", keys, names)
            assert meta.tags["picture_tokens"].tolist() == [8, 8, 8, 8, 16, 16, 0, 0]
            found = client.get_blobs(meta, "images")
            assert found.references.counts.tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
            assert [found.of(row).tolist() for row in (0, 2, 5)] == [[0], [0], [0, 1]]
            assert len(client.rows("train#images").keys) == 2
            columns = client.get(meta)
            lengths = columns.jagged("input_ids").lengths
            assert lengths[3] == lengths[2] and lengths[6] == 1, "a sampled placeholder is a token like any other"
            grids = found.blobs.ragged("image_grid_thw").values.reshape(-1, 3)
            assert np.prod(grids.numpy(), axis=1).tolist() == [32, 32]
            client.clear("train")
            assert client.status().bytes_used == 0


def test_pictures_that_make_a_prompt_too_long_are_one_sentence(
    tmp_path: Path, vision_folder: str, vision_tokenizer: Any
) -> None:
    pool = Inside(ImagesConfig(enabled=True), vision_folder, vision_folder, vision_tokenizer)
    prompt = stream(tmp_path, vision_tokenizer)[2]

    async def run() -> None:
        ready = await RowPictures(pool, vision_tokenizer, 64).prepared(prompt)
        assert json.loads(json.dumps(plain_prompt(ready)))["pictures"] == [], (
            "what a reward in a process of its own gets"
        )
        assert len(ready.prepared) == 2 and len(prompt.pictures) == 2 and isinstance(prompt.pictures[0], Picture)
        with pytest.raises(
            BadPicture,
            match=r"got 9, but prompt '2' \(line 3 of '.*'\) has \d+ tokens, 16 of them for 2 pictures",
        ):
            await RowPictures(pool, vision_tokenizer, 9).prepared(prompt)
        more = replace(prompt, text=prompt.text + PAD)
        with pytest.raises(BadPicture, match=r"prompt '2' \(line 3 of '.*'\): the text has 3 placeholders "):
            await RowPictures(pool, vision_tokenizer, 64).prepared(more)
        await pool.close()

    asyncio.run(run())
