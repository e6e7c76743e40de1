"""The column of sampling masks: made of the turns of rows, checked, counted, and kept by the journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.engines.protocol import Completion
from headrace.actors.environments.turns import Transcript
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rollout.journal import JournaledGroup, encode_record, read_group
from headrace.actors.rollout.results import GroupFigures
from headrace.actors.rollout.rows import MaskCounts, MaskRules, RolloutRows, checked_masks, rollout_rows
from headrace.codecs.tokens.masks import MASKS, decode_sets, encode_sets

GOOD = Score(1.0, {}, True)
SETS = ([3, 7, 9], [8], [1, 2, 4, 9])
TOKENS = [7, 8, 9]
RULES = MaskRules(4, required=True)


def sample(masks: np.ndarray | None, index: int = 0) -> Sample:
    """Return a sample of two prompt tokens, two turns of three tokens each, and a tool's token between them."""
    numbers = np.zeros(3, np.float32), "stop", np.zeros(3, np.int32), None
    turn = Completion(np.array(TOKENS, np.int32), *numbers, masks)
    transcript = Transcript([1, 2])
    for _ in range(2):
        transcript.choose(turn)
        transcript.give([5])
    row = transcript.row()
    return Sample(
        Prompt("p", "", "", {}), index, row.input_ids, row.response_mask, row.logprobs, "", "stop", row.versions,
        masks=row.masks,
    )  # fmt: skip


def turn_masks() -> np.ndarray:
    sizes = np.array([len(one) for one in SETS])
    return encode_sets(np.array(TOKENS), np.concatenate(SETS), sizes)


def test_rows_carry_the_sets_of_their_turns_which_are_counted_and_journaled(tmp_path: Path) -> None:
    samples = [sample(turn_masks()), sample(turn_masks(), 1)]
    found = checked_masks(samples, [GOOD, replace(GOOD, valid=False)], RULES, max_rows=2)
    stream = samples[0].masks
    assert stream is not None and [score.valid for score in found.scores] == [True, False]
    assert found.counts == [MaskCounts(6, 16, 2, len(stream) + 1 + 2 * 6, single=2), MaskCounts()]
    assert found.column.shapes[:2].sum() == found.counts[0].num_bytes, (
        "the second row stands in for one that is not there"
    )
    [uncut] = checked_masks(samples[:1], [GOOD], replace(RULES, top_k=4)).counts
    assert not uncut.cut, "no more were left without the limit"
    batch, tags = rollout_rows(samples, found.scores, max_rows=2)
    batch = found.added_to(batch)
    sets = decode_sets(batch.ragged(MASKS).values.numpy(), int(batch.jagged("input_ids").lengths.sum()))
    own = np.array([2, 0, 3])
    assert sets.counts[:10].tolist() == [-1, -1, *own, -1, *own, -1] and not sets.restricted[10:].any()
    rows = RolloutRows(["p.0", "p.0+1", "p.1", "p.1+1"], np.zeros(4, np.int64), tags, batch)
    path = tmp_path / "record"
    path.write_bytes(encode_record(JournaledGroup(0, rows, GroupFigures(masks=found.counts[0])), 0, 0))
    group = read_group(path, 0)
    assert group.rows.batch.ragged(MASKS).values.tolist() == batch.ragged(MASKS).values.tolist()
    assert group.figures.masks == found.counts[0]


@pytest.mark.parametrize(("masks", "limit"), [(None, 4), (turn_masks(), 3)])
def test_a_row_with_a_token_without_its_set_or_with_a_larger_one_has_failed(
    masks: np.ndarray | None, limit: int
) -> None:
    found = checked_masks([sample(masks)], [GOOD], MaskRules(limit, required=True))
    [score], [counts] = found.scores, found.counts
    assert not score.valid and score.failure == "engine" and counts == MaskCounts()
    assert f"expected 1 to rollout.mask_limit={limit}" in score.error
    assert not decode_sets(found.column.values.numpy(), 10).restricted.any(), "what is not trained on has no sets"


def test_the_masks_of_other_tokens_are_refused() -> None:
    other = encode_sets(np.array([3, 4, 5]), np.array([3, 8, 4, 8, 5, 8]), np.array([2, 2, 2]))
    [score] = checked_masks([sample(other)], [GOOD], RULES).scores
    assert score.error == "p.0: the sampling mask of token 3 is that of another token"


def test_requests_that_may_ask_for_all_tokens_need_no_sets() -> None:
    found = checked_masks([sample(None), sample(turn_masks())], [GOOD] * 2, MaskRules(4, required=False))
    assert found.scores == [GOOD] * 2 and [one.ids for one in found.counts] == [0, 16]
