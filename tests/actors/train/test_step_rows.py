"""Tests of the rows of a step as a rank reads them from the store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.actors.protocols import row_schema
from headrace.actors.train.step_rows import StepRows, TrainShard
from headrace.codecs.jagged import pack
from headrace.codecs.tokens.masks import MASKS, MasksDamaged, encode_sets, sealed
from headrace.testing.data_plane import plane


def test_sampling_masks_that_are_damaged_on_the_way_name_their_row() -> None:
    """The changed bit leaves a stream of sets, over which the row would have other log-probs."""
    tokens = np.array([3, 4, 5])
    good = sealed(encode_sets(tokens, np.array([3, 8, 4, 8, 5, 8]), np.array([2, 2, 2])), 3)
    bad = good.copy()
    bad[4] ^= 1
    schema, keys = row_schema(None, masks=True).subset(("input_ids", MASKS)), ["p0.0", "p0.1", "p1.0", "p1.1"]
    for damaged in (False, True):
        streams = [torch.from_numpy(bad if damaged and key == "p1.0" else good) for key in keys]
        columns = {"input_ids": [torch.from_numpy(tokens).int()] * 4, MASKS: streams}
        with plane(schema, group_size=2) as client:
            meta = client.put("train", keys, pack(schema, columns))
            rows = StepRows(client, TrainShard(1, None, np.array([2, 2]), "plan", traced=False), meta)
            assert rows.columns(0, ("input_ids",)).num_rows == rows.columns(0, (MASKS,)).num_rows == 2
            if damaged:
                with pytest.raises(MasksDamaged, match="p1.0: the sampling masks are damaged"):
                    rows.columns(1, ("input_ids", MASKS))
            else:
                rows.columns(1, ("input_ids", MASKS))
                few = TrainShard(1, None, np.array([0, 4, 0]), "plan", traced=False)
                for index, count in enumerate(few.sizes):  # Ranks with fewer rows have empty microbatches.
                    assert StepRows(client, few, meta).columns(index, ("input_ids", MASKS)).num_rows == count
                none = meta.select(np.zeros(0, np.int64))
                without = StepRows(client, TrainShard(1, None, np.array([0]), "plan", traced=False), none)
                assert without.columns(0, (MASKS,)).num_rows == 0
