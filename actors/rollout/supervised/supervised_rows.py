"""Supplies the rows of a supervised run to a rollout actor, as a journal supplies recorded groups.

The row at a position depends only on the files and the seed, so a resumed run goes on at its position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from ....dataplane.meta import POSITION
from ...engines.stop_tokens import end_tokens
from ...protocols import Sample, Score
from ..journal import JournaledGroup, Purpose
from ..prompts import PromptStream
from ..results import group_figures
from ..rows import RolloutRows, rollout_rows, sample_keys
from .config import SftConfig
from .examples import Examples
from .turn_marks import TurnMarker

HELD_OUT = 1 << 40
"""Position of the first row of validation. Those before it are rows to train on."""


class SupervisedRows:
    """The rows of a supervised run. Each is a group of its own, at a position in the stream of its prompts."""

    purpose: Purpose = "replay"

    def __init__(self, config: SftConfig, tokenizer: Any, model: str, *, seed: int) -> None:
        """Read all files. model: folder or hub id of the model. seed: seed of the order of each epoch.
        Raises ValueError, which names file and line, for a line that is no conversation."""
        self._marker = TurnMarker(tokenizer, end_tokens(model, tokenizer), config.chat_template_kwargs)
        self._train = Examples(config, validation=False)
        self.prompts = PromptStream(self._train, seed=seed)
        """Rows to train on, in the order of training."""
        self._held_out = None if config.validation is None else Examples(config, validation=True)

    def find_all(self, positions: Iterable[int]) -> list[JournaledGroup]:
        """Return the rows at `positions`; those from HELD_OUT on are the rows of validation. Raises ValueError, which
        names file and line, for a row that cannot be made."""
        places = list(positions)
        samples = [self._sample(position) for position in places]
        if not samples:
            return []
        scores = [Score(reward=1.0, components={}, valid=True)] * len(samples)
        batch, tags = rollout_rows(samples, scores)
        tags[POSITION] = np.array(places, np.int64)
        keys = [key for sample in samples for key in sample_keys(sample, 1)]
        rows = RolloutRows(keys, np.zeros(len(keys), np.int64), tags, batch).split([1] * len(keys))
        figures = [group_figures([sample], scores[:1]) for sample in samples]
        return [JournaledGroup(*group) for group in zip(places, rows, figures, strict=True)]

    def _sample(self, position: int) -> Sample:
        if position >= HELD_OUT:
            assert self._held_out is not None, "only a run with a file of validation asks for its rows"
            examples, prompt = self._held_out, PromptStream(self._held_out, shuffle=False)[position - HELD_OUT]
        else:
            examples, prompt = self._train, self.prompts[position]
        tokens = examples.tokens(prompt.fields["row"], self._marker)
        return Sample(
            prompt=prompt,
            index=0,
            input_ids=tokens.ids,
            response_mask=tokens.mask,
            logprobs=np.zeros(len(tokens.ids), np.float32),
            text="",
            finish_reason="stop",
            versions=np.full(len(tokens.ids), -1, np.int32),
        )

    def append(self, groups: Iterable[JournaledGroup]) -> None:
        """Refuse groups, because a supervised run generates none."""
        raise AssertionError(f"a supervised run generates no groups, got {list(groups)}")

    def trim(self, first: int, outstanding: Collection[int]) -> None:
        """Do nothing, because the files keep all rows."""

    def close(self) -> None:
        """Do nothing, because no file is open."""
