"""Supplies the rows of a supervised run to a rollout actor, as a journal supplies recorded groups.

The row at a position depends only on the files and the seed, so a resumed run goes on at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ....dataplane.meta import POSITION
from ...engines.stop_tokens import end_tokens
from ...images.config import ImagesConfig
from ...protocols import Prompt, Sample, Score
from ..journal import JournaledGroup, Purpose
from ..prompts import CHECKED_WITH_PICTURES, AddedTokens, PromptStream, no_tokens
from ..results import group_figures
from ..rows import RolloutRows, rollout_rows, sample_keys
from .config import SftConfig
from .examples import Examples
from .turn_marks import TurnMarker, TurnTokens

if TYPE_CHECKING:  # It imports transformers, which takes seconds.
    from ...images.processor import PictureProcessor, Prepared

HELD_OUT = 1 << 40
"""Position of the first row of validation. Those before it are rows to train on."""


class SupervisedRows:
    """The rows of a supervised run. Each is a group of its own, at a position in the stream of its prompts."""

    purpose: Purpose = "replay"

    def __init__(
        self,
        config: SftConfig,
        tokenizer: Any,
        model: str,
        *,
        seed: int,
        images: ImagesConfig | None = None,
        added: AddedTokens = no_tokens,
    ) -> None:
        """Read all files. model: folder or hub id of the model. seed: seed of the order of each epoch. images: section
        `data.images`. added: counts the tokens that pictures add to their placeholders. Raises ValueError, which names
        file and line, for a line that is no conversation, and if one of the first rows with pictures is too long."""
        self._marker = TurnMarker(tokenizer, end_tokens(model, tokenizer), config.chat_template_kwargs)
        self._train = Examples(config, validation=False, images=images)
        self.prompts = PromptStream(self._train, seed=seed)
        """Rows to train on, in the order of training."""
        self._held_out = None if config.validation is None else Examples(config, validation=True, images=images)
        self._shown = None if self._held_out is None else PromptStream(self._held_out, shuffle=False)
        for examples in filter(None, [self._train, self._held_out] if added is not no_tokens else []):
            for index in range(min(examples.size, CHECKED_WITH_PICTURES)):
                if shown := examples.row(index).pictures:
                    examples.tokens(index, self._marker, added=added(shown))

    def find_all(self, positions: Iterable[int]) -> list[JournaledGroup]:
        """Return the rows at `positions`; those from HELD_OUT on are the rows of validation. Raises ValueError, which
        names file and line, for a row that cannot be made."""
        places = list(positions)
        return self.groups(places, [self.sample(position) for position in places])

    def groups(
        self, places: Sequence[int], samples: Sequence[Sample], add: Callable[[RolloutRows], RolloutRows] | None = None
    ) -> list[JournaledGroup]:
        """Return rows as groups. places: their positions. add: adds columns to all rows."""
        if not samples:
            return []
        scores = [
            Score(float(not one.error), {}, valid=not one.error, error=one.error, failure=one.failure)
            for one in samples
        ]
        batch, tags = rollout_rows(samples, scores)
        tags[POSITION] = np.array(places, np.int64)
        keys = [key for sample in samples for key in sample_keys(sample, 1)]
        rows = RolloutRows(keys, np.zeros(len(keys), np.int64), tags, batch)
        parts = (rows if add is None else add(rows)).split([1] * len(keys))
        figures = [group_figures([sample], [score]) for sample, score in zip(samples, scores, strict=True)]
        return [JournaledGroup(*group) for group in zip(places, parts, figures, strict=True)]

    def prompt(self, position: int) -> Prompt:
        """Return the number of the row at a position, and the row's pictures."""
        if position < HELD_OUT:
            return self.prompts[position]
        assert self._shown is not None, "only a run with a file of validation asks for its rows"
        return self._shown[position - HELD_OUT]

    def sample(
        self, position: int, processor: PictureProcessor | None = None, prepared: Sequence[Prepared] = ()
    ) -> Sample:
        """Return the row at a position. prepared: its pictures, preprocessed by `processor`. Raises what
        `Examples.tokens` raises."""
        prompt = replace(self.prompt(position), prepared=tuple(prepared))
        examples = self._train if position < HELD_OUT else self._held_out
        assert examples is not None
        tokens = examples.tokens(prompt.fields["row"], self._marker, processor, prepared)
        shown = () if processor is None else processor.within(tokens.ids, prepared, prompt.uid)
        return _sample(prompt, tokens, pictures=shown)

    def failed(self, position: int, error: str) -> Sample:
        """Return the row at a position whose pictures cannot be used: one token, which is not trained on."""
        return _sample(self.prompt(position), TurnTokens.of([0], np.zeros(1)), error=error)

    def append(self, groups: Iterable[JournaledGroup]) -> None:
        """Refuse groups, because a supervised run generates none."""
        raise AssertionError(f"a supervised run generates no groups, got {list(groups)}")

    def trim(self, first: int, outstanding: Collection[int]) -> None:
        """Do nothing, because the files keep all rows."""

    def close(self) -> None:
        """Do nothing, because no file is open."""


def _sample(prompt: Prompt, tokens: TurnTokens, *, pictures: tuple[Prepared, ...] = (), error: str = "") -> Sample:
    return Sample(
        prompt=prompt,
        index=0,
        input_ids=tokens.ids,
        response_mask=tokens.mask,
        logprobs=np.zeros(len(tokens.ids), np.float32),
        text="",
        finish_reason="error" if error else "stop",
        versions=np.full(len(tokens.ids), -1, np.int32),
        pictures=pictures,
        error=error,
        failure="environment" if error else None,
    )
