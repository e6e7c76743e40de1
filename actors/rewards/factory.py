"""Builds rewards, and the rubric that weighs them, from their configuration."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ...codecs.imports import import_object
from ..protocols import Reward
from .builtin import Format, Overlong, exact_match, per_position
from .rubric import TOKENS, Rubric, takes_tokens

_FUNCTIONS: dict[str, Reward] = {"exact_match": exact_match, "per_position": per_position}
_CLASSES: dict[str, Any] = {"format": Format, "overlong": Overlong}
REWARD_KINDS = (*_FUNCTIONS, *_CLASSES)


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """One line of the rubric."""

    kind: str
    """One of REWARD_KINDS, or an import path `package.module:name` of a function or class of the user's own."""
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments: of the constructor for a class, of every call for a function."""
    name: str = ""
    """Its name in metrics; "": the kind (of an import path, what stands behind the colon)."""
    tagged: bool = False
    """Whether rows are tagged with its own value, for advantages that need more than the total."""

    @property
    def label(self) -> str:
        return self.name or self.kind.split(":")[-1]


def build_rubric(configs: Sequence[RewardConfig]) -> Rubric:
    """Build the rubric. Raises ValueError for an unknown kind, a path that cannot be imported or unfit options."""
    return Rubric(
        [(config.label, build_reward(config), config.weight) for config in configs],
        [config.label for config in configs if config.tagged],
    )


def build_reward(config: RewardConfig) -> Reward:
    """Build one reward. Raises like `build_rubric`."""
    target = _target(config.kind)
    options = dict(config.options)
    is_class = inspect.isclass(target)
    _check_options(config.kind, target, options, is_class)
    if not is_class:
        return functools.partial(target, **options) if options else target
    reward = target(**options)
    if not callable(reward):
        raise ValueError(f"reward: objects of {config.kind!r} cannot be called as (prompt, response, finish_reason)")
    return cast(Reward, reward)


def _target(kind: str) -> Any:
    """Return the function or class that `kind` names."""
    if ":" in kind:
        target = import_object(kind, "reward")
        if not callable(target):
            raise ValueError(f"reward: {kind!r} is a {type(target).__name__}, expected a function or class")
        return target
    if kind in _FUNCTIONS:
        return _FUNCTIONS[kind]
    if kind in _CLASSES:
        return _CLASSES[kind]
    near = difflib.get_close_matches(kind, REWARD_KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"reward: got {kind!r}, expected one of {', '.join(REWARD_KINDS)} "
        f"or an import path 'package.module:function'{hint}"
    )


def _check_options(kind: str, target: Any, options: dict[str, Any], is_class: bool) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-in callables have no signature, so a wrong option only shows in the call
        return
    arguments = () if is_class else (None, None, None)
    given = {TOKENS: None} if not is_class and takes_tokens(target) else {}
    try:
        signature.bind(*arguments, **given, **options)
    except TypeError as error:
        raise ValueError(f"reward {kind!r} with options {sorted(options)}: {error}") from error
