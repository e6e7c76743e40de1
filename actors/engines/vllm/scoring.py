"""Reads the log-probs of given tokens from vLLM, which computes them as those of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..protocol import RowScores
from . import library
from .process import VllmProcess


class RowScorer:
    """Scores rows of tokens with one vLLM request for each, all of them at the same time."""

    def __init__(self, process: VllmProcess) -> None:
        self._process = process
        self._count = 0

    async def score(self, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int) -> list[RowScores]:
        """Return the scores of the wanted tokens of each row, in order; see `Scorer.score`. Raises
        library.EngineDeadError when vLLM's engine process has died, and RuntimeError if vLLM leaves out a score."""
        # vLLM generates at least one token, which is dropped.
        params = library.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        first, self._count = self._count, self._count + len(rows)
        names = [f"score {first + index}" for index in range(len(rows))]
        tasks = [asyncio.ensure_future(self._one(*each, params)) for each in zip(names, rows, wanted, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, name: str, row: np.ndarray, wanted: np.ndarray, params: Any) -> RowScores:
        found = None
        async for output in self._process.generate(name, row.tolist(), params):
            found = output.prompt_logprobs
        if found is None or len(found) != len(row):
            raise RuntimeError(
                f"{name}: vLLM gave log-probs of {0 if found is None else len(found)} of {len(row)} tokens"
            )
        return row_scores(found, wanted, params.prompt_logprobs)


def row_scores(found: Any, wanted: np.ndarray, top_k: int) -> RowScores:
    """Return the scores of a row's wanted tokens. found: vLLM's flat log-probs of the row, which have at each position
    but the first the token itself, and after it the `top_k` most likely ones."""
    starts = np.array(found.start_indices, np.int64)[np.flatnonzero(wanted)]
    places = starts[:, None] + np.arange(top_k + 1)
    ids, values = np.array(found.token_ids, np.int32)[places], np.array(found.logprobs, np.float32)[places]
    return values[:, 0], ids[:, 1:], values[:, 1:]
