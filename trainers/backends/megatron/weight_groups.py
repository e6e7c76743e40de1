"""Freezes Megatron's parameters, and groups them for the optimizer, by the names and roles of their HF weights.

One parameter of Megatron holds several HF weights, such as queries, keys and values, so these must be treated alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..config import TrainerConfig
from ..hf_model import HfSource
from ..optimizers.groups import freeze, settings_by_name
from .library import ParamKey, ParamPredicate
from .model import PolicyModel
from .pieces import is_parameter
from .weights import Entry, entries_of, hf_layer

SETTINGS = "group_settings"
"""Attribute of a parameter with its weight decay and the factor of its learning rate."""


def freeze_entries(model: PolicyModel, source: HfSource, trainer: TrainerConfig) -> None:
    """Exclude the weights of a rank's `model` whose HF names match `trainer.freeze` from training.

    Raises ValueError, on every rank, which names the key: as `freeze` does, if a part of one of Megatron's parameters
    would be frozen, and if a pipeline stage would have no weight of a decoder layer to train.
    """
    whole, patterns = source.empty_model(), list(trainer.freeze)
    frozen = freeze(whole, patterns)
    trained = {name for name, param in whole.named_parameters() if param.requires_grad}
    size = source.config.num_hidden_layers // trainer.pp
    if len({layer // size for layer in map(hf_layer, trained) if layer is not None}) < trainer.pp:
        raise ValueError(
            f"trainer.freeze: got {patterns}, expected patterns that leave weights of decoder layers to train in every "
            f"stage of trainer.pp = {trainer.pp}"
        )
    for param, entry in _entries(model, source.config):
        parts = frozen.intersection(entry.hf_names)
        _expect_alike("freeze", patterns, entry, len(parts) in (0, len(entry.hf_names)))
        param.requires_grad_(not parts)


def group_parameters(model: PolicyModel, source: HfSource, trainer: TrainerConfig) -> None:
    """Mark each trained parameter of a rank's `model` with its weight decay and the factor of its learning rate.

    Raises ValueError, which names the key, if `trainer.groups` treats the parts of one parameter differently.
    """
    for param in model.parameters():
        setattr(param, SETTINGS, (trainer.weight_decay, 1.0))  # Matrices of an adapter have no HF weight.
    if trainer.lora.rank:
        return
    whole = source.empty_model()
    freeze(whole, trainer.freeze)
    settings = settings_by_name(whole, trainer)
    for param, entry in _entries(model, source.config):
        if param.requires_grad:
            found = {settings[name] for name in entry.hf_names}
            patterns = [group.pattern for group in trainer.groups]
            _expect_alike("groups", patterns, entry, len(found) == 1)
            setattr(param, SETTINGS, found.pop())


def overrides_of(model: torch.nn.Module) -> dict[ParamKey, Any]:
    """Return Megatron's settings for the groups of the parameters of `model`.

    Megatron's own scheduler, which would read them, is not used: `max_lr` is the factor of the learning rate, and
    `wd_mult` the weight decay itself.
    """
    found = {getattr(param, SETTINGS) for param in model.parameters() if param.requires_grad}
    return {
        ParamKey(predicate=ParamPredicate(f"{one}", lambda param, one=one: getattr(param, SETTINGS) == one)): {
            "wd_mult": one[0], "max_lr": one[1],
        }
        for one in found
    }  # fmt: skip


def _entries(model: PolicyModel, config: Any) -> Iterator[tuple[torch.nn.Parameter, Entry]]:
    weights = model.weights()
    for entry in entries_of(list(weights), model.first_layer, config):
        param: Any = weights[entry.name]
        if is_parameter(param):
            yield param, entry


def _expect_alike(key: str, patterns: list[str], entry: Entry, alike: bool) -> None:
    if not alike:
        raise ValueError(
            f"trainer.{key}: got {patterns}, which match a part of {', '.join(sorted(entry.hf_names))}, expected all "
            "or none of these, because Megatron has them in one parameter"
        )
