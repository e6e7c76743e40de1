"""Rows with pictures in a supervised run have the tokens and the pictures that a rollout's prompt has."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.preparation import PicturePool
from headrace.actors.images.processor import PictureProcessor, Processed
from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.journal import JournaledGroup
from headrace.actors.rollout.pictures.picture_rows import RowPictures
from headrace.actors.rollout.prompts import PromptStream, open_prompts
from headrace.actors.rollout.rows import PICTURE_TOKENS
from headrace.actors.rollout.supervised.config import SftConfig
from headrace.actors.rollout.supervised.supervised_rows import HELD_OUT, SupervisedRows
from headrace.codecs.blobs import References
from headrace.tests.actors.images.tiny_vision import PAD, draw, encoded

IMAGES = ImagesConfig(enabled=True)
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "count"}
ASK = {"role": "user", "content": [IMAGE, TEXT]}
ONE, TWO = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}


class Inside(PicturePool):
    """A pool that works in this process, because a process of its own takes seconds to start."""

    async def _run(self, data: bytes) -> Processed:
        return self.processor.process(data)


def write(folder: Path, *lines: Any) -> str:
    for name, seed in (("a", 0), ("b", 1)):
        (folder / f"{name}.png").write_bytes(encoded(draw(100, 60, seed)))
    file = folder / "my.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def rows_of(
    file: str, folder: str, tokenizer: Any, positions: list[int], **settings: Any
) -> tuple[list[JournaledGroup], PictureProcessor]:
    """Return the rows at positions, and the processor of their pictures."""
    pool = Inside(IMAGES, folder, folder, tokenizer)
    config = SftConfig.model_validate({"train": file, "validation": file, **settings})
    rows = SupervisedRows(config, tokenizer, folder, seed=0, images=IMAGES, added=pool.processor.added_tokens)

    async def find() -> list[JournaledGroup]:
        found = await RowPictures(pool, tokenizer, 64).find_all(rows, positions, rows.prompts)
        await pool.close()
        return found

    return asyncio.run(find()), pool.processor


def ids_of(group: JournaledGroup) -> list[int]:
    return group.rows.batch.jagged("input_ids").values.tolist()


def pictures_of(group: JournaledGroup) -> list[str]:
    references = References.read(group.rows.batch.ragged("images"))
    return [references.names[int(index)] for index in references.index]


def test_a_row_is_a_prompt_with_its_answer(tmp_path: Path, vision_folder: str, vision_tokenizer: Any) -> None:
    two = {"messages": [ASK, ONE, ASK, TWO], "images": ["a.png", "b.png"]}
    file = write(tmp_path, {"messages": [ASK, ONE], "image": "a.png"}, two, {"prompt": "a", "completion": "b"})
    held_out = [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    groups, processor = rows_of(file, vision_folder, vision_tokenizer, held_out)
    assert [len(pictures_of(group)) for group in groups] == [1, 2, 0]
    assert [group.rows.tags[PICTURE_TOKENS].tolist() for group in groups] == [[8], [16], [0]]
    prompts = write(tmp_path, {"prompt": [ASK], "image": "a.png", "answer": "1"})
    config = DataConfig.model_validate({"train": prompts, "images": {"enabled": True}})
    prompt = PromptStream(open_prompts(config, vision_tokenizer, seed=0, check_lengths=True).source)[0]
    pool = Inside(IMAGES, vision_folder, vision_folder, vision_tokenizer)
    shown = asyncio.run(RowPictures(pool, vision_tokenizer, 64).prepared(prompt))
    before = vision_tokenizer(shown.text, add_special_tokens=False)["input_ids"]
    assert ids_of(groups[0])[: len(before)] == before and pictures_of(groups[0]) == [shown.prepared[0].blob.name]
    mask = groups[0].rows.batch.jagged("response_mask").values.numpy()
    trained = np.array(ids_of(groups[0]))[mask != 0].tolist()
    assert vision_tokenizer.decode(trained) == "1 <end>" and not mask[: len(before)].any()
    # Each turn in a row of its own has the pictures before it.
    each, _ = rows_of(write(tmp_path, two), vision_folder, vision_tokenizer, held_out[:2], turns="each")
    assert pictures_of(each[0]) == pictures_of(groups[0]) and pictures_of(each[1]) == pictures_of(groups[1])
    pad = processor.token_ids[0]
    assert [ids_of(group).count(pad) for group in each] == [8, 16]


def test_a_row_is_cut_before_a_picture(tmp_path: Path, vision_folder: str, vision_tokenizer: Any) -> None:
    two = {"messages": [ASK, ONE, ASK, TWO], "images": ["a.png", "b.png"]}
    file = write(tmp_path, two)
    [whole], processor = rows_of(file, vision_folder, vision_tokenizer, [0])
    second = [at for at, token in enumerate(ids_of(whole)) if token == processor.token_ids[0]][8]
    cut = {"overlong": "truncate", "max_tokens": second + 3}
    [group], _ = rows_of(file, vision_folder, vision_tokenizer, [0], **cut)
    assert ids_of(group) == ids_of(whole)[:second] and len(pictures_of(group)) == 1
    with pytest.raises(
        ValueError, match=r"^sft.train: line 1 of .*: the row has \d+ tokens, expected at most sft.max_"
    ):
        rows_of(file, vision_folder, vision_tokenizer, [], max_tokens=second + 3)


def test_what_is_refused(tmp_path: Path, vision_folder: str, vision_tokenizer: Any) -> None:
    def refused(line: Any, said: str, images: ImagesConfig | None = IMAGES) -> None:
        with pytest.raises(ValueError, match=rf"^sft.train: line 1 of .*: {said}"):
            config = SftConfig.model_validate({"train": write(tmp_path, line)})
            SupervisedRows(config, vision_tokenizer, vision_folder, seed=0, images=images)

    shown = {"messages": [ASK, ONE], "image": "a.png"}
    refused(shown, "message 0 has a part of type 'image', expected only text while data.images.enabled=false", None)
    refused({"messages": [ASK, ONE]}, "the messages have 1 part of type image without a picture, but the row has 0 pic")
    refused({"messages": [ASK, {**ONE, "content": [IMAGE]}]}, "message 1 of the assistant has a picture, expected only")
    refused({"prompt": "a", "completion": "b", "image": "a.png"}, "got pictures beside texts, expected messages")
    refused({"messages": [{**ASK, "content": [{"type": "video"}]}, ONE]}, "message 0 has a part of type 'video', exp")


def test_a_row_whose_picture_is_damaged_fails_alone(tmp_path: Path, vision_folder: str, vision_tokenizer: Any) -> None:
    more = {"messages": [{**ASK, "content": [IMAGE, {**TEXT, "text": PAD}]}, ONE], "image": "a.png"}
    file = write(tmp_path, {"messages": [ASK, ONE], "image": "a.png"}, {"messages": [ASK, ONE], "image": "c.png"}, more)
    (tmp_path / "c.png").write_bytes(b"none")
    groups, _ = rows_of(file, vision_folder, vision_tokenizer, [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2])
    assert [group.figures.failed for group in groups] == [0, 1, 1]
    assert "line 2 of " in groups[1].figures.errors[0] and "picture 0: got 4 bytes that" in groups[1].figures.errors[0]
    assert "line 3 of " in groups[2].figures.errors[0] and "2 placeholders" in groups[2].figures.errors[0]
    assert [group.rows.tags["valid"].tolist() for group in groups] == [[1.0], [0.0], [0.0]]
    assert not groups[1].rows.batch.jagged("response_mask").values.any() and not pictures_of(groups[1])
