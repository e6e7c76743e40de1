"""Adds the pictures of a microbatch to the layout of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....actors.engines.hf.pictures import feature_places, picture_positions, read_pictures
from ....actors.train.topology import Topology
from ....actors.train_backend import MicroBatch
from ....codecs.blobs import BlobRows
from ..rows.row_layout import RowLayout, to_device


def expect_computable(pictures: BlobRows, topology: Topology, *, replays: bool) -> None:
    """Raise ValueError, naming the key, if rows with pictures cannot be computed with this mesh, or with router replay.

    replays: true if passes replay routes.
    """
    if topology.cp > 1:
        raise ValueError(f"trainer.cp: got {topology.cp}, expected 1 for rows with pictures")
    if replays:
        raise ValueError("router_replay.enabled: got true, expected false for rows with pictures")
    if topology.dp > 1 and not pictures.blobs.num_rows:
        raise ValueError(
            "images: got a microbatch without a picture, expected at least one, to which no row need refer, with "
            f"trainer.dp = {topology.dp}, because all ranks gather the weights of the vision tower"
        )


def with_pictures(layout: RowLayout, micro: MicroBatch, model: Any, device: torch.device) -> RowLayout:
    """Return the layout of whole rows with their pictures on `device`; `layout` itself without pictures.

    Tokens of pictures have the positions that the model gives to them. Raises ValueError if the model takes no
    pictures, or if a row has another number of placeholders than its pictures have features.
    """
    pictures = None if micro.pictures is None else read_pictures(micro.pictures)
    if pictures is None:
        return layout
    if not len(micro.lengths):  # The rank has no rows, but takes part in the passes of the tower.
        return replace(layout, pictures=pictures.to(device))
    kept = np.maximum(micro.lengths - 1, 0)  # The layout has no row's last token.
    inside = np.concatenate([np.arange(length) < count for length, count in zip(micro.lengths, kept, strict=True)])
    mask = np.arange(layout.longest) < kept[:, None]
    ids, sampled = np.zeros(mask.shape, np.int64), np.zeros(mask.shape, np.bool_)
    ids[mask] = micro.batch.jagged("input_ids").values.cpu().numpy()[inside]
    if "response_mask" in micro.batch:
        sampled[mask] = micro.batch.jagged("response_mask").values.cpu().numpy()[inside]
    places, every = feature_places(model, ids, mask, pictures, sampled)
    positions = picture_positions(model, ids, mask, pictures, places)
    if positions is not None:
        # Packed rows also need the positions in their text, by which the model finds where a row begins.
        text = layout.position_ids
        positions = to_device(positions if text is None else positions[:, torch.from_numpy(mask)][:, None], device)
        positions = positions if text is None else torch.cat([text[None], positions])
    else:
        positions = layout.position_ids
    if not every:
        flat = torch.from_numpy(places)
        pictures = replace(pictures, places=flat if layout.position_ids is None else flat[torch.from_numpy(mask)][None])
    return replace(layout, position_ids=positions, pictures=pictures.to(device))
