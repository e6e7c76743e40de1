"""Prepares the pictures of prompts before their episodes, and puts the pictures of episodes into rows, by reference.

A row has exactly as many placeholder tokens as its pictures have features, because the model's forward pass puts one
feature in the place of each. Those that the policy samples come on top, and stand for themselves. Rows that do not fit
are masked and hold one token and no picture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ....codecs.batch import Batch
from ....codecs.blobs import Blob, References, references_of
from ....codecs.schema import Field, Schema
from ....dataplane.imports import MissingExtra
from ...engines.tokenizer import count_tokens
from ...images.prompt_pictures import BadPicture
from ...process.user_errors import counted
from ...protocols import Prompt, Sample, Score
from ..data_config import DataConfig
from ..journal import JournaledGroup, KnownGroups
from ..prompts import PromptStream, row_key
from ..rows import PICTURE_TOKENS, RolloutRows, rows_of
from ..supervised.supervised_rows import SupervisedRows

if TYPE_CHECKING:  # These import transformers, which takes seconds.
    from ...images.preparation import PicturePool
    from ...images.processor import PictureProcessor, Prepared


class RowPictures:
    """The pictures of the prompts and rows of one rollout actor."""

    def __init__(self, pool: PicturePool, tokenizer: Any, max_prompt_tokens: int) -> None:
        """pool: preprocesses the pictures. max_prompt_tokens: largest number of tokens of a prompt with its
        pictures."""
        self.pool = pool
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def field(self) -> Field:
        """Declaration of the column of pictures."""
        return self.pool.processor.field

    async def prepared(self, prompt: Prompt) -> Prompt:
        """Return a prompt with its pictures preprocessed, and with all their placeholder tokens in its text.

        Raises BadPicture if a picture cannot be used, if its text has not one placeholder for each, or if the prompt
        then has too many tokens.
        """
        prepared, place = await self.pool.prepare(prompt.pictures), f"prompt {prompt.uid!r}"
        place += f" ({prompt.place})" if prompt.place else ""
        text, most = self.pool.processor.expanded(prompt.text, prepared, place), self._max_prompt_tokens
        if prepared and (count := int(count_tokens(self._tokenizer, [text], [prompt.rendered])[0])) > most:
            of_pictures = sum(one.num_tokens for one in prepared)
            raise BadPicture(
                f"data.max_prompt_tokens: got {most}, but {place} has {count} tokens, {of_pictures} of them for "
                f"{counted(len(prepared), 'picture')}"
            )
        return replace(prompt, text=text, prepared=tuple(prepared))

    def checked(self, samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[list[Sample], list[Score]]:
        """Return samples and scores, where samples have failed whose tokens do not fit their pictures. These hold one
        masked token and no picture."""
        checked: list[Sample] = []
        marked: list[Score] = []
        processor = self.pool.processor
        for sample, score in zip(samples, scores, strict=True):
            try:
                for row in sample.rows:
                    counts = [one.num_tokens for one in row.pictures]
                    given = row.input_ids[row.response_mask == 0]
                    processor.check_row(given, counts, row_key(sample.prompt.uid, sample.index))
            except BadPicture as error:
                sample = _blank(sample, processor)
                if score.valid:
                    score = Score(reward=0.0, components={}, valid=False, error=str(error), failure="engine")
            checked.append(sample)
            marked.append(score)
        return checked, marked

    def with_column(self, rows: RolloutRows, samples: Sequence[Sample], max_rows: int) -> RolloutRows:
        """Return rows with the column of their pictures and the tag PICTURE_TOKENS. samples: those of the rows, with
        `max_rows` rows each."""
        listed = [row.pictures for sample in samples for row in rows_of(sample, max_rows)]
        references, blobs = references_of(self.field, [[one.blob for one in pictures] for pictures in listed])
        tokens = np.array([sum(one.num_tokens for one in pictures) for pictures in listed], np.float32)
        schema = Schema([*rows.batch.schema.values(), self.field])
        batch = Batch(schema, rows.batch.num_rows, {**rows.batch, self.field.name: references.column()})
        return replace(rows, batch=batch, pictures=blobs, tags={**rows.tags, PICTURE_TOKENS: tokens})

    async def find_all(
        self, known: KnownGroups, positions: Sequence[int], prompts: PromptStream
    ) -> list[JournaledGroup]:
        """Return the groups at `positions` that need not be generated, with their pictures. known: the journal, or the
        rows of a supervised run. prompts: those of the positions."""
        if isinstance(known, SupervisedRows):
            return await self._supervised(known, positions)
        groups, replayed = await asyncio.to_thread(known.find_all, positions), known.purpose == "replay"
        shown = [await self.restored(one, prompts[one.position], replayed=replayed) for one in groups]
        return [group for group in shown if group is not None]

    async def _supervised(self, rows: SupervisedRows, positions: Sequence[int]) -> list[JournaledGroup]:
        """Return the rows of a supervised run. Those whose pictures cannot be used have failed."""
        prepared = await asyncio.gather(
            *(self.pool.prepare(rows.prompt(position).pictures) for position in positions), return_exceptions=True
        )

        def made(position: int, found: list[Prepared] | BaseException) -> Sample:
            try:
                if isinstance(found, BaseException):
                    raise found
                return rows.sample(position, self.pool.processor, found)
            except BadPicture as error:
                return rows.failed(position, str(error))

        def make() -> list[JournaledGroup]:
            samples = list(map(made, positions, prepared))
            return rows.groups(positions, samples, partial(self.with_column, samples=samples, max_rows=1))

        return await asyncio.to_thread(make)

    async def restored(self, group: JournaledGroup, prompt: Prompt, *, replayed: bool) -> JournaledGroup | None:
        """Return a group with the pictures of its prompt, which the journal does not keep. None if the group has others
        than these; it is then to be generated again. With `replayed`, others raise ValueError."""
        pictures: dict[str, Blob] = {}
        with suppress(BadPicture):
            pictures = {one.blob.name: one.blob for one in await self.pool.prepare(prompt.pictures)}
        lost = set(References.read(group.rows.batch.ragged(self.field.name)).names) - pictures.keys()
        if lost and replayed:
            raise ValueError(
                f"run.replay: pictures in the rows of prompt {prompt.uid!r} ({len(lost)}) are not among those that the "
                "prompt has now, expected the same files and the same processor as in the recorded run"
            )
        return None if lost else replace(group, rows=replace(group.rows, pictures=pictures))

    def values(self, rows: RolloutRows) -> Mapping[str, Any]:
        """Return the values of a put, with the pictures themselves in place of their digests."""
        references = References.read(rows.batch.ragged(self.field.name))
        named = iter([rows.pictures[references.names[index]] for index in map(int, references.index)])
        listed = [[next(named) for _ in range(count)] for count in references.counts.tolist()]
        return {**rows.batch, self.field.name: listed}


def open_pictures(data: DataConfig, model: str, tokenizer_path: str, tokenizer: Any) -> RowPictures | None:
    """Return what prepares the pictures of a rollout actor; None if prompts have none. model, tokenizer_path,
    tokenizer: see `PicturePool`. Raises ValueError if the model has no processor of pictures, and MissingExtra."""
    if not data.images.enabled:
        return None
    try:
        from ...images.preparation import PicturePool  # It imports transformers, which takes seconds.
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "PIL", "data.images.enabled=true", "vision") from None
    pool = PicturePool(data.images, model, tokenizer_path, tokenizer)
    pool.warm_up()
    return RowPictures(pool, tokenizer, data.max_prompt_tokens)


def _blank(sample: Sample, processor: PictureProcessor) -> Sample:
    plain = ~np.isin(sample.input_ids, [*processor.token_ids, *processor.other_ids])
    ids = sample.input_ids[plain][:1]
    if not len(ids):
        ids = np.zeros(1, np.int32)
    return replace(
        sample,
        pictures=(),
        input_ids=ids,
        response_mask=np.zeros(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        versions=np.full(1, -1, np.int32),
        more_rows=(),
        routes=(),
        token_values=(),
    )
