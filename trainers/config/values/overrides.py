"""Applies overrides such as `trainer.lr=1e-4` to a configuration; a value has the type that its key declares.

The value of a text key is the text that was typed, whatever it looks like. Quotes around the whole value are removed,
and `null` unsets a key that can be unset. The value of any other key is YAML, without comments.
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from ....dataplane.config import encodable
from ...errors import ConfigError
from .yaml_values import Loader, annotation_at, can_be_unset, is_text, parse_yaml

NULLS = ("null", "Null", "NULL", "~")
"""Values that YAML reads as null."""


def apply_override(data: dict[str, Any], override: str, root: type[BaseModel]) -> None:
    """Apply the override `key.sub=value` to the nested data in place. A number in the dotted key is an index into a
    list. root: class of the configuration, which declares the types of keys. Raises ConfigError if the override is
    malformed or does not fit the data."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"override {override!r}: expected key.sub=value, such as trainer.lr=1e-4"])
    if not encodable(override):
        raise ConfigError([f"override {override!r}: got bytes that are not UTF-8, expected text"])
    value = override_value(text, annotation_at(keys, root), f"override {override!r}")
    here: Any = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                at = ".".join(keys[:depth])
                raise ConfigError(
                    [f"override {override!r}: got {key!r} in {at}, expected a number below {len(here)}, its length"]
                )
            place: Any = int(key)
        elif isinstance(here, dict):
            place = key
            if not last and here.get(key) is None:
                here[key] = {}
        else:
            at = ".".join(keys[:depth])
            raise ConfigError([f"override {override!r}: got {here!r:.80} as {at}, expected a section with keys"])
        if last:
            here[place] = value
        else:
            here = here[place]


def override_value(text: str, annotation: Any, where: str) -> Any:
    """Return the value of an override. text: text after the equals sign. annotation: declared type of the key; None if
    it is unknown. Raises ConfigError if the value must be YAML and is not."""
    if is_text(annotation):
        if text in NULLS and can_be_unset(annotation):
            return None
        return _without_quotes(text)
    if _has_comment(text):  # YAML would drop the rest of the text.
        return text
    return parse_yaml(text, where, annotation)


def _without_quotes(text: str) -> str:
    """Return the content of a text that is a YAML scalar in quotes as a whole, and any other text as it is."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return text
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError:
        return text
    return node.value if isinstance(node, yaml.ScalarNode) else text


def _has_comment(text: str) -> bool:
    """Return whether a part of `text` would be a comment in YAML."""
    end = 0
    try:
        for token in yaml.scan(text, Loader=Loader):
            if "#" in text[end : token.start_mark.index]:
                return True
            end = max(end, token.end_mark.index)
    except yaml.YAMLError:
        return False
    return False
