"""The processor of pictures: the model's own tensors for each picture, and rows whose tokens fit their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.import_utils import is_torchvision_available

from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.processor import PictureProcessor
from headrace.actors.images.prompt_pictures import BadPicture, Picture
from headrace.tests.actors.images.tiny_vision import END, PAD, START, draw, encoded


def test_tensors_are_those_of_transformers(processor: PictureProcessor, vision_folder: str) -> None:
    images = [draw(100, 60), draw(57, 200, seed=1)]
    prepared = [processor.prepared(processor.process(encoded(image))) for image in images]
    plain = Qwen2VLImageProcessorPil.from_pretrained(vision_folder)(images, return_tensors="pt")
    for name in ("pixel_values", "image_grid_thw"):
        parts = [one.blob.batch.ragged(name) for one in prepared]
        shaped = [part.values.reshape(tuple(part.shapes[0])) for part in parts]
        assert torch.equal(torch.cat(shaped), plain[name])
    counts = (plain["image_grid_thw"].prod(dim=1) // 4).tolist()
    assert [one.num_tokens for one in prepared] == counts and [one.text for one in prepared] == [
        PAD * n for n in counts
    ]
    assert "Qwen2VLImageProcessorPil" in processor.note and vision_folder in processor.note
    again = processor.prepared(processor.process(encoded(images[0])))
    assert again.blob.name == prepared[0].blob.name != prepared[1].blob.name


def test_options_and_the_number_format(vision_folder: str, vision_tokenizer: Any) -> None:
    options = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}}
    config = ImagesConfig(enabled=True, dtype="bfloat16", processor_options=options)
    small = PictureProcessor(config, vision_folder, vision_tokenizer)
    prepared = small.prepared(small.process(encoded(draw(100, 60))))
    assert prepared.num_tokens == 1 and prepared.blob.batch.ragged("pixel_values").values.dtype == torch.bfloat16


def test_a_model_without_pictures_is_refused(tmp_path: Path, vision_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^model.path: got '.*', expected a model with a processor of pictures: "):
        PictureProcessor(ImagesConfig(enabled=True), str(tmp_path), vision_tokenizer)


DAMAGED_AVIF = encoded(draw(40, 40), "AVIF").replace(b"iloc", b"free")
"""Makes PIL raise a RuntimeError as soon as it is opened."""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("processor_options", {"longest_edge": 9}, r"got 'longest_edge', expected options of Qwen2VL.*, size"),
        ("processor_options", {"size": {"shortest_edge": 1}}, r"got \{'size': .*\}, but the processor does"),
        pytest.param(
            "backend", "torchvision", "got 'torchvision', but transformers gives Qwen2VLImageProcessorPil",
            marks=pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed"),
        ),
    ],
)  # fmt: skip
def test_what_transformers_would_ignore_is_refused(
    vision_folder: str, vision_tokenizer: Any, key: str, value: Any, said: str
) -> None:
    config = ImagesConfig.model_validate({"enabled": True, key: value})
    with pytest.raises(ValueError, match=rf"^data.images.{key}: {said}"):
        PictureProcessor(config, vision_folder, vision_tokenizer)


@pytest.mark.parametrize(
    "data", [b"GIF89a", b"not a picture", encoded(draw(40, 40))[:200], encoded(draw(40, 40), "EPS"), DAMAGED_AVIF]
)
def test_damaged_pictures_are_one_sentence(processor: PictureProcessor, data: bytes) -> None:
    with pytest.raises(BadPicture, match="expected a picture|cannot be decoded"):
        processor.process(data)
    processor.added_tokens([Picture("p", data)])


def test_placeholders_are_as_many_as_pictures(processor: PictureProcessor) -> None:
    picture = processor.prepared(processor.process(encoded(draw(100, 60))))
    shown = f"{START}{PAD}{END}"
    assert processor.expanded(f"{shown} a {shown}", [picture] * 2, "p").count(PAD) == 2 * picture.num_tokens
    for text, pictures in ((shown, []), (shown * 2, [picture]), ("a", [picture])):
        found = text.count(PAD)
        with pytest.raises(
            BadPicture, match=rf"^p: the text has {found} placeholders? .* has {len(pictures)} pictures?"
        ):
            processor.expanded(text, pictures, "p")


def test_rows_have_a_token_for_each_feature(processor: PictureProcessor) -> None:
    pad, video = processor.token_ids[0], processor.other_ids[0]
    row = np.array([5, *[pad] * 8, 6, *[pad] * 4, 7], np.int32)
    processor.check_row(row, [8, 4], "a.0")
    processor.check_row(np.array([5, 6]), [], "a.0")
    for ids, counts, message in (
        (
            [*row, pad],
            [8, 4],
            r"a.0: the row has 13 placeholder tokens of pictures, expected 12, .* \(picture 1 has 4\)",
        ),
        (row[2:], [8, 4], r"a.0: .* has 11 .* expected 12, .* \(picture 1 has 4\)"),
        (row[9:], [8, 4], r"a.0: .* has 4 .* expected 12, .* \(picture 0 has 8\)"),
        ([5, pad], [], r"a.0: .* has 1 .* expected 0, .* \(it has no picture\)"),
        ([5, video], [], "a.0: token 1 stands for a video or a recording, expected only pictures"),
    ):
        with pytest.raises(BadPicture, match=f"^{message}"):
            processor.check_row(np.array(ids), counts, "a.0")


def test_tokens_are_counted_from_sizes_alone(processor: PictureProcessor, tmp_path: Path) -> None:
    sizes = [(100, 60), (57, 200), (28, 28), (640, 480)]
    pictures = [Picture("p", encoded(draw(*size))) for size in sizes]
    prepared = [processor.prepared(processor.process(picture.data)) for picture in pictures]
    assert processor.added_tokens(pictures) == sum(one.num_tokens - 1 for one in prepared)
    turned, file = draw(120, 50), tmp_path / "a.jpg"
    turned.getexif()[0x0112] = 6
    turned.save(file, exif=turned.getexif())
    of_turned = processor.prepared(processor.process(file.read_bytes())).num_tokens
    assert processor.added_tokens([Picture("p", address=str(file))]) == of_turned - 1
    unknown = [Picture("p", b"damaged"), Picture("p", address="missing.png"), Picture("p", address="http://x/a.png")]
    assert processor.added_tokens([*unknown, pictures[0]]) == prepared[0].num_tokens - 1
