"""Hands vLLM pictures as the trainer gets them: preprocessed once, elsewhere, and named by a digest of their content.

vLLM takes such inputs as its own renderer makes them: the tensors, a hash that names them, and the places in the
prompt. Its own processor of pictures is never loaded. `take_pictures_as_they_are` says what vLLM asks it nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.utils.import_utils import is_torchvision_available

from .....codecs.batch import Ragged
from .....codecs.blobs import Blob
from .....codecs.integers import cut_up
from ....process.user_errors import counted
from ...hf.pictures import NUM_TOKENS
from .. import library
from .absent_torchvision import without_torchvision

MODALITY = "image"
_PIECES = ("num_patches", "image_num_patches")
"""Arguments of vLLM's models that transformers' do not have: the number of pieces into which a picture was cut."""


_TOWER = {re.compile(r"^((?:model\.)?vision_tower\.)(?!vision_model\.)"): r"\1vision_model."}
"""Names of the weights of Gemma 3's tower in transformers 5, and in vLLM 0.26 to 0.32, which has those of transformers
4 and does not load what transformers 5 saves. Delete this when it does."""


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """The pictures of a prompt in the form in which vLLM takes them."""

    names: tuple[str, ...]
    """Digest of each picture."""
    items: tuple[Any, ...]
    """Arguments of the model for each picture (MultiModalKwargsItem)."""
    places: tuple[Any, ...]
    """Places of the features of each picture in the prompt (PlaceholderRange)."""

    def prompt(self, token_ids: list[int], salt: str, sent: Any) -> dict[str, Any]:
        """Return vLLM's form of a prompt with these pictures.

        salt: text that is another one whenever the weights are others, because vLLM keeps the features of a picture.
        sent: vLLM's cache of the pictures that its engine process has already; None if it keeps none. The result must
        be submitted before any other prompt.
        """
        names, items = [f"{salt} {name}" for name in self.names], list(self.items)
        if sent is not None:
            # vLLM's engine process does the same in the same order, so that both keep the same pictures.
            for name in names:
                sent.touch_sender_cache_item(name)
            items = [sent.get_and_update_item((item, ()), name)[0] for item, name in zip(items, names, strict=True)]
        return {
            "type": "multimodal",
            "prompt_token_ids": token_ids,
            "mm_kwargs": {MODALITY: items},
            "mm_hashes": {MODALITY: names},
            "mm_placeholders": {MODALITY: list(self.places)},
            "cache_salt": salt,
        }


class PictureTaker:
    """Turns the pictures of requests into vLLM's form."""

    def __init__(self, config: Any, processor: Any) -> None:
        """config: vLLM's configuration of the model. processor: vLLM's processor of the model, as `own_processors` lets
        it be; None if the model takes no pictures."""
        self._model = config.hf_config.model_type
        self._placeholder: int | None = getattr(config.hf_config, "image_token_id", None)
        self._hindrance = ""
        """Reason why requests may have no pictures; "" if they may."""
        if processor is None or self._placeholder is None:
            self._hindrance = f"vLLM takes no pictures for models of type {self._model!r}"
        elif library.on_cpu() and config.is_mm_prefix_lm:
            self._hindrance = (
                f"in models of type {self._model!r} the tokens of a picture see each other, and in vLLM's kernels for "
                "CPUs a token sees only those before it"
            )
        self._dtype = config.dtype
        self._processor: Any = processor

    def shown(self, request_id: str, prompt: np.ndarray, pictures: Sequence[Blob]) -> ShownPictures:
        """Return the pictures of a request, placed in its prompt.

        prompt: token ids of the prompt, with -1 for those that the policy sampled, int64 `[L]`. Raises ValueError if
        the model takes no pictures, or no pictures with these parts, or if the prompt has another number of
        placeholders than the pictures have features.
        """
        if self._hindrance:
            raise ValueError(
                f"request {request_id!r}: got {counted(len(pictures), 'picture')}, expected none, because "
                f"{self._hindrance}"
            )
        counts = [int(picture.batch.tensor(NUM_TOKENS)[0]) for picture in pictures]
        places = _places(request_id, np.flatnonzero(prompt == self._placeholder), counts)
        items = [self._item(request_id, number, picture) for number, picture in enumerate(pictures)]
        return ShownPictures(tuple(one.name for one in pictures), tuple(items), places)

    def _item(self, request_id: str, number: int, picture: Blob) -> Any:
        parts = {name: self._part(column) for name, column in picture.batch.items() if isinstance(column, Ragged)}
        pieces = torch.tensor([len(next(iter(parts.values())))])
        given = {**parts, **dict.fromkeys(_PIECES, pieces), "image_token_id": torch.tensor(self._placeholder)}
        # The model's own class in vLLM says how the arguments of several pictures are joined.
        config = self._processor._get_mm_fields_config(given, {})
        if unknown := sorted(parts.keys() - config.keys()):
            raise ValueError(
                f"request {request_id!r}: picture {number} has the part {unknown[0]!r}, which vLLM does not take for "
                f"models of type {self._model!r}"
            )
        (item,) = library.MultiModalKwargsItems.from_hf_inputs(given, config)[MODALITY]
        return item

    def _part(self, column: Ragged) -> torch.Tensor:
        part = column.values.view(column.shapes[0].tolist())
        # The model would do this first. So fewer bytes travel.
        return part.to(self._dtype) if part.is_floating_point() else part


def _places(request_id: str, found: np.ndarray, counts: Sequence[int]) -> tuple[Any, ...]:
    """Return the place of each picture. found: positions of the placeholders in the prompt. counts: number of features
    of each picture. Raises ValueError, naming request and picture, if the numbers differ."""
    ends = np.cumsum(counts)
    if len(found) != ends[-1]:
        number = min(int(np.searchsorted(ends, len(found), side="right")), len(counts) - 1)
        raise ValueError(
            f"request {request_id!r}: the prompt has {counted(len(found), 'placeholder')} of pictures, expected "
            f"{ends[-1]}, one for each feature of its {counted(len(counts), 'picture')} (picture {number} has "
            f"{counts[number]})"
        )
    return tuple(_place(one) for one in cut_up(found, counts))


def _place(positions: np.ndarray) -> Any:
    """Return the place with these positions. Between the pieces of a picture there may be other tokens."""
    start, length = int(positions[0]), int(positions[-1] - positions[0]) + 1
    if length == len(positions):
        return library.PlaceholderRange(offset=start, length=length)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[torch.from_numpy(positions - start)] = True
    return library.PlaceholderRange(offset=start, length=length, is_embed=mask)


@contextmanager
def own_processors(model: str) -> Iterator[None]:
    """Context manager in which vLLM makes its processors of models with pictures without those of transformers.

    model: folder or hub id of the model.
    """
    registry: Any = library.MULTIMODAL_REGISTRY
    take_pictures_as_they_are()
    with without_torchvision():
        _look_at_class(model)
    try:
        yield
    finally:
        vars(registry).pop("_get_model_cls", None)


def _look_at_class(model: str) -> None:
    """Show vLLM the class of a model with pictures where torchvision is missing.

    vLLM would look at it in a process of its own, where it cannot be loaded.
    """
    config = AutoConfig.from_pretrained(model)
    if is_torchvision_available() or getattr(config, "vision_config", None) is None:
        return
    for name in config.architectures or ():
        if (registered := library.ModelRegistry.models.get(name)) is not None:
            library.ModelRegistry.register_model(name, registered.load_model_cls())


def take_pictures_as_they_are() -> None:
    """Answer what this process's vLLM would ask the processor of transformers. Idempotent.

    It asks what inputs a model takes, and how many tokens a picture has at most. The processor of transformers may need
    libraries that are not installed, and a tokenizer. vLLM 0.26 to 0.32 do not let their user say that inputs come
    preprocessed. Delete this function when vLLM does.
    """
    registry: Any = library.MULTIMODAL_REGISTRY
    if "_get_model_cls" in vars(registry):
        return
    find_class = registry._get_model_cls

    def find(config: Any) -> Any:
        with without_torchvision():
            found = find_class(config)
        if found.__name__ == "Gemma3ForConditionalGeneration":
            found.hf_to_vllm_mapper |= type(found.hf_to_vllm_mapper)(orig_to_new_regex=_TOWER)
        return SimpleNamespace(_processor_factory=_without_transformers(found._processor_factory))

    registry._get_model_cls = find


def _without_transformers(factories: Any) -> Any:
    """Return the factories of a model's processor, changed as `take_pictures_as_they_are` says."""
    info = type(
        "PreparedInfo",
        (factories.info,),
        {
            "get_supported_mm_limits": lambda self: {MODALITY: None},
            "get_mm_max_tokens_per_item": lambda self, seq_len, mm_counts: {MODALITY: seq_len},
        },
    )
    processor = type("PreparedProcessor", (factories.processor,), {"requires_tokenizer": False})
    return replace(factories, info=info, processor=processor)


def engine_scheduler(**settings: Any) -> Any:
    """Return vLLM's own scheduler, which runs in the engine process.

    If there are several workers, they run in other processes, and nothing else of Headrace is loaded in this one.
    """
    take_pictures_as_they_are()
    return library.scheduler_class(settings["vllm_config"])(**settings)


SCHEDULER = f"{__name__}.{engine_scheduler.__name__}"
