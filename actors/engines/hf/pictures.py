"""Shows pictures to Hugging Face models, for the engine and the train backend, which thus compute the same policy.

The vision tower runs here and not in the model's forward, which gets the tower's features. So a picture that many rows
show is encoded once, and arguments for the attention of the text part do not reach the tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ....codecs.batch import Ragged
from ....codecs.blobs import Blob, BlobRows, References
from ....codecs.jagged import concat
from ...process.user_errors import counted

NUM_TOKENS = "num_tokens"
"""Name of the part of a picture that has the number of its placeholders."""
GRIDS = "image_grid_thw"
"""Name of the part of a picture from which models with positions in three dimensions compute them."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """The P distinct pictures of N rows."""

    parts: Mapping[str, torch.Tensor]
    """Arguments of the model's `get_image_features` by name, those of all pictures one after another along dimension
    0."""
    num_tokens: np.ndarray
    """Number of placeholders of each picture, which is the number of its features, int64 `[P]`."""
    index: np.ndarray
    """Position of the picture of each reference among the P pictures, row after row, int64 `[sum(counts)]`."""
    counts: np.ndarray
    """Number of pictures of each row, int64 `[N]`."""
    places: torch.Tensor | None = None
    """True for each token that a feature replaces, bool in the form of the rows' tokens; None if these are all
    placeholders."""

    def to(self, device: torch.device) -> Pictures:
        """Return the same pictures on a device."""
        places = None if self.places is None else self.places.to(device)
        return replace(self, parts={name: part.to(device) for name, part in self.parts.items()}, places=places)


def read_pictures(rows: BlobRows) -> Pictures | None:
    """Return the pictures of rows as models take them; None if there is none. Copies nothing.

    A picture to which no row refers is encoded all the same, for ranks that must take part in passes of the vision
    tower. Raises ValueError if the pictures cannot be joined, because a part of them has another shape than that of the
    others.
    """
    references = rows.references
    if not rows.blobs.num_rows:
        return None
    parts = {name: _joined(name, column) for name, column in rows.blobs.items() if isinstance(column, Ragged)}
    num_tokens = rows.blobs.tensor(NUM_TOKENS).numpy().astype(np.int64)
    return Pictures(parts, num_tokens, references.index, references.counts)


def prompt_pictures(blobs: Sequence[Blob]) -> Pictures | None:
    """Return the pictures of one prompt, given in the order of its placeholders; None if it has none.

    Raises ValueError as `read_pictures` does.
    """
    if not blobs:
        return None
    references = References.of([blob.name for blob in blobs], [len(blobs)])
    of_name = {blob.name: blob.batch for blob in blobs}
    return read_pictures(BlobRows(concat([of_name[name] for name in references.names]), references))


def join_pictures(of_rows: Sequence[Pictures | None]) -> Pictures | None:
    """Return the pictures of several rows, given those of each; None if no row has one. Pictures that are the same
    object are encoded once."""
    distinct = {id(one): one for one in of_rows if one is not None}
    if not distinct:
        return None
    parts = [one.parts for one in distinct.values()]
    num_tokens = [one.num_tokens for one in distinct.values()]
    starts = dict(zip(distinct, np.cumsum([0, *map(len, num_tokens)]), strict=False))
    return Pictures(
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        np.concatenate(num_tokens),
        np.concatenate([starts[id(one)] + one.index for one in of_rows if one is not None]),
        np.array([0 if one is None else len(one.index) for one in of_rows], np.int64),
    )


def _joined(name: str, column: Ragged) -> torch.Tensor:
    trailing = column.shapes[:, 1:]
    other = np.flatnonzero((trailing != trailing[:1]).any(axis=1))
    if len(other):
        raise ValueError(
            f"images: {name} of picture {other[0]} has the shape {column.shapes[other[0]].tolist()}, expected "
            f"{['any', *trailing[0].tolist()]}, because pictures are joined along the first dimension"
        )
    return column.values.view(-1, *trailing[0].tolist())


def placeholder_id(model: Any) -> int:
    """Return the id of the token in whose places the model puts the features of pictures. Raises ValueError if the
    model takes no pictures."""
    found = getattr(model.config, "image_token_id", None)
    if found is None or not hasattr(model.base_model, "get_image_features"):
        raise ValueError(f"model.path: got a {type(model).__name__}, expected a model that takes pictures")
    return int(found)


def feature_places(
    model: Any,
    ids: np.ndarray,
    mask: np.ndarray,
    pictures: Pictures,
    sampled: np.ndarray | None = None,
    name: str = "images: row",
) -> tuple[np.ndarray, bool]:
    """Return which tokens the features of pictures replace, bool `[N, L]`, and whether they are all placeholders.

    A policy can sample a placeholder, which then stands for itself like any other token. ids: tokens of the rows,
    padded, int64 `[N, L]`. mask: which of them are the rows' own, bool `[N, L]`. sampled: which of them the policy
    sampled, bool `[N, L]`; a row without any may have more placeholders, after those of its pictures. None if no row
    may have more. name: what the rows are called in errors. Raises ValueError if a row has another number of
    placeholders than its pictures have features.
    """
    holders = (ids == placeholder_id(model)) & mask
    places = holders if sampled is None else holders & ~sampled
    found, rows = places.sum(axis=1), np.repeat(np.arange(len(ids)), pictures.counts)
    wanted = np.bincount(rows, weights=pictures.num_tokens[pictures.index], minlength=len(ids)).astype(np.int64)
    more = np.zeros(len(ids), np.bool_) if sampled is None else ~sampled.any(axis=1)
    wrong = np.flatnonzero((found < wanted) | (found > wanted) & ~more)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{name} {row} has {counted(found[row], 'placeholder')} of pictures, expected {wanted[row]}, the number of "
            f"features of its {counted(pictures.counts[row], 'picture')}"
        )
    places = places & (places.cumsum(axis=1) <= wanted[:, None])
    return places, bool((places == holders).all())


def picture_positions(
    model: Any, ids: np.ndarray, mask: np.ndarray, pictures: Pictures, places: np.ndarray
) -> torch.Tensor | None:
    """Return the positions of tokens in time, height and width, int64 `[3, N, L]` on the CPU.

    They are 0 at padding. None for a model that counts tokens alone. places: as `feature_places` returns them, which
    has the other arguments, too.
    """
    base = model.base_model
    if not hasattr(base, "get_rope_index"):
        return None
    kept = mask.copy()
    kept[~mask.any(axis=1), 0] = True  # The model's code needs a token in each row.
    positions, _ = base.get_rope_index(
        torch.from_numpy(ids),
        mm_token_type_ids=torch.from_numpy(places.astype(np.int32)),
        image_grid_thw=pictures.parts[GRIDS].cpu().long()[torch.from_numpy(pictures.index)],
        attention_mask=torch.from_numpy(kept.astype(np.int64)),
    )
    return positions


def packed_positions(model: Any, positions: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens, int64 `[1, S]` for packed rows without pictures, as the model takes them.

    A model with positions in time, height and width must get those in the text as well, because it finds by them where
    a row begins: Qwen2.5-VL lets packed rows see each other without.
    """
    plain = positions.ndim == 2 and hasattr(model.base_model, "get_rope_index")
    return positions.expand(4, *positions.shape) if plain else positions


ShareFeatures = Callable[[Callable[[], Any], int], Any]
"""Function that returns the output of a vision tower, given a function that runs it, and the number of its features."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Features of pictures, in the place of their pixels in a forward pass."""

    output: Any


def _encoded_features(pixel_values: _Encoded, *_: Any, **__: Any) -> Any:
    """Stand in for `get_image_features` of a model, whose pictures are encoded already."""
    return pixel_values.output


def takes_token_types(model: Any) -> bool:
    """Return whether the tokens of a picture see each other, those behind them, too. The model must know which tokens
    these are."""
    return "token_type_ids" in inspect.signature(type(model.base_model).forward).parameters


def picture_arguments(
    model: Any, ids: torch.Tensor, pictures: Pictures, share: ShareFeatures | None = None
) -> dict[str, Any]:
    """Run the vision tower, and return the arguments with which the model's forward shows its features in `ids`.

    ids: tokens of all rows in one order of rows with that of `pictures`, int64 `[N, L]` or `[1, S]`. share: lets one
    rank run the tower for several; None for a rank that runs it for itself. Raises ValueError if the tower gives
    another number of features than the pictures declare.
    """
    base = model.base_model

    def encode() -> Any:
        accepted = inspect.signature(type(base).get_image_features).parameters
        given = {name: part for name, part in pictures.parts.items() if name in accepted}
        return type(base).get_image_features(base, **given, return_dict=True)

    output = encode() if share is None else share(encode, int(pictures.num_tokens.sum()))
    kind, places = placeholder_id(model), pictures.places
    others = None  # A sampled placeholder keeps its embedding, and gets nothing in later layers.
    if places is not None:
        found = places[ids == kind]
        others = found, base.get_input_embeddings()(ids.new_tensor([kind]))
    output.pooler_output = _shown(output.pooler_output, pictures, others)
    if getattr(output, "deepstack_features", None) is not None:  # Qwen3-VL adds some to its first layers, too.
        others = None if others is None else (others[0], torch.zeros_like(others[1]))
        output.deepstack_features = [_shown(features, pictures, others) for features in output.deepstack_features]
    # Only since transformers 5.18 a model takes features by itself, as `mm_encoder_outputs`.
    base.get_image_features = _encoded_features
    arguments: dict[str, Any] = {"pixel_values": _Encoded(output)}
    if takes_token_types(model):
        arguments["token_type_ids"] = (ids == kind if places is None else places).long()
    return arguments


def flat_features(features: Any) -> torch.Tensor:
    """Return the features of pictures one after another, `[features, H]`; see `_shown` for their forms."""
    return features.flatten(0, -2) if isinstance(features, torch.Tensor) else torch.cat(list(features))


def _shown(features: Any, pictures: Pictures, others: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    """Return features of distinct pictures as those of every reference. They are a tuple with a tensor for each
    picture, or one tensor `[pieces, tokens, H]`; the result is of the same kind.

    others: which of all placeholders are those of features, bool `[placeholders]`, and the value for those that are
    not, `[1, H]`; None if all are.
    """
    alone, flat = isinstance(features, torch.Tensor), flat_features(features)
    if len(flat) != pictures.num_tokens.sum():
        raise ValueError(
            f"images: the model gives {counted(len(flat), 'feature')} to "
            f"{counted(len(pictures.num_tokens), 'picture')}, expected {pictures.num_tokens.sum()}, the sum of their "
            f"{NUM_TOKENS}"
        )
    of_picture = flat.split(pictures.num_tokens.tolist())
    shown = torch.cat([flat[:0], *(of_picture[index] for index in pictures.index)])
    if others is not None:
        found, value = others
        shown = value.to(shown.dtype).expand(len(found), -1).index_put((found.nonzero()[:, 0],), shown)
    return shown if alone else (shown,)
