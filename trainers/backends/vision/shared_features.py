"""Lets one rank of a replica run the vision tower, and broadcasts the features of pictures to the others.

All ranks of tensor parallelism have the whole tower, so each would compute the same. Features are smaller than pixels,
and the other ranks need neither the pixels nor their place on the device. A tower that is trained needs its gradients
on every rank, so every rank runs it then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ....actors.engines.hf.pictures import flat_features


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of a tower's output, which is the same for all pictures."""

    alone: bool
    """True if the features are one tensor, and not a tuple of tensors."""
    widths: tuple[int, ...]
    """Number of values of a feature: of the output, then of each layer that gets some of its own."""
    dtypes: tuple[torch.dtype, ...]


class SharedFeatures:
    """The features of pictures on the ranks of one group, the first of which runs the tower."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """device: device of the features."""
        self._group, self._device = group, device
        self._form: _Form | None = None

    def __call__(self, encode: Callable[[], Any], count: int) -> Any:
        """Return the tower's output, without gradient. Collective.

        encode: runs the tower; called on the first rank only. count: number of features. Raises ValueError on the first
        rank if the tower gives another number of them; the other ranks then wait until their timeout.
        """
        found, device = list[torch.Tensor](), self._device
        leads, form = dist.get_rank(self._group) == 0, self._form
        if leads:
            with torch.no_grad():
                output = encode()
            found = [flat_features(one).contiguous() for one in _parts(output)]
            if len(found[0]) != count:
                raise ValueError(f"images: the model gives {len(found[0])} features to pictures, expected {count}")
            alone = isinstance(output.pooler_output, torch.Tensor)
            form = _Form(alone, tuple(one.shape[1] for one in found), tuple(one.dtype for one in found))
        if self._form is None:
            said = [form]
            dist.broadcast_object_list(said, group_src=0, group=self._group, device=device)
            self._form = form = said[0]
        assert form is not None
        if not leads:
            shapes = zip(form.widths, form.dtypes, strict=True)
            found = [torch.empty(count, width, dtype=dtype, device=device) for width, dtype in shapes]
        for part in found:
            dist.broadcast(part, group_src=0, group=self._group)
        shown = found if form.alone else [(one,) for one in found]
        return SimpleNamespace(pooler_output=shown[0], deepstack_features=list(shown[1:]) or None)


def _parts(output: Any) -> list[Any]:
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def encodes_alike(model: Any) -> bool:
    """Return whether nothing that a HF model computes between pixels and features is trained. False for a model that
    takes no pictures."""
    if not hasattr(model.base_model, "get_image_features"):
        return False
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {id(param) for part in text if part is not None for param in part.parameters()}
    return not any(param.requires_grad and id(param) not in of_text for param in model.parameters())
