"""Prepares the pictures of prompts before their episodes, and puts them into rows, by reference.

A row has exactly as many placeholder tokens as its pictures have features, because the model's forward pass puts one
feature in the place of each. Rows that do not fit are masked and hold one token and no picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...codecs.batch import Column, Ragged
from ...codecs.blobs import Blob, References, references_of
from ...codecs.schema import Field
from ..engines.tokenizer import count_tokens
from ..images.pictures import BadPicture
from ..protocols import Prompt, Sample, Score
from .prompts import row_key

if TYPE_CHECKING:  # These import transformers, which takes seconds.
    from ..images.preparation import PicturePool
    from ..images.processor import PictureProcessor


async def with_pictures(pool: PicturePool, prompt: Prompt, tokenizer: Any, max_tokens: int) -> Prompt:
    """Return a prompt with its pictures preprocessed, and with all their placeholder tokens in its text.

    Raises BadPicture if a picture cannot be used, if its text has not one placeholder for each, or if the prompt then
    has more than `max_tokens` tokens.
    """
    prepared, place = await pool.prepare(prompt.pictures), f"prompt {prompt.uid!r}"
    text = pool.processor.expanded(prompt.text, prepared, place)
    if prepared and (count := int(count_tokens(tokenizer, [text], [prompt.rendered])[0])) > max_tokens:
        of_pictures = sum(one.num_tokens for one in prepared)
        raise BadPicture(
            f"data.max_prompt_tokens: got {max_tokens}, but {place} has {count} tokens, {of_pictures} of them for its "
            f"{len(prepared)} pictures"
        )
    return replace(prompt, text=text, prepared=tuple(prepared))


def checked_pictures(
    processor: PictureProcessor, samples: Sequence[Sample], scores: Sequence[Score]
) -> tuple[list[Sample], list[Score]]:
    """Return samples and scores, where samples have failed whose tokens do not fit their pictures. These hold one
    masked token and no picture."""
    checked, marked = [], []
    for sample, score in zip(samples, scores, strict=True):
        try:
            counts = [one.num_tokens for one in sample.prompt.prepared]
            processor.check_row(sample.input_ids, counts, row_key(sample.prompt.uid, sample.index))
        except BadPicture as error:
            sample = _blank(sample, processor)
            if score.valid:
                score = Score(reward=0.0, components={}, valid=False, error=str(error), failure="engine")
        checked.append(sample)
        marked.append(score)
    return checked, marked


def _blank(sample: Sample, processor: PictureProcessor) -> Sample:
    plain = ~np.isin(sample.input_ids, [*processor.token_ids, *processor.other_ids])
    ids = sample.input_ids[plain][:1]
    if not len(ids):
        ids = np.zeros(1, np.int32)
    return replace(
        sample,
        prompt=replace(sample.prompt, prepared=()),
        input_ids=ids,
        response_mask=np.zeros(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        versions=np.full(1, -1, np.int32),
        more_rows=(),
        routes=(),
        token_values=(),
    )


def picture_column(field: Field, samples: Sequence[Sample]) -> tuple[Ragged, dict[str, Blob]]:
    """Return the column of pictures of the samples' rows, one row each, and the pictures by their digests."""
    references, blobs = references_of(field, [[one.blob for one in sample.prompt.prepared] for sample in samples])
    return references.column(), blobs


def put_values(columns: Mapping[str, Column], field: Field | None, blobs: Mapping[str, Blob]) -> Mapping[str, Any]:
    """Return the values of a put, with the pictures themselves in place of their digests."""
    if field is None:
        return columns
    references = References.read(ragged_of(columns, field))
    ends = np.cumsum(references.counts)
    names = [references.names[index] for index in references.index.tolist()]
    rows = [
        [blobs[name] for name in names[end - count : end]] for end, count in zip(ends, references.counts, strict=True)
    ]
    return {**columns, field.name: rows}


def ragged_of(columns: Mapping[str, Column], field: Field) -> Ragged:
    """Return the column of digests."""
    column = columns[field.name]
    assert isinstance(column, Ragged)
    return column
