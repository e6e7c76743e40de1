"""Parses YAML into plain values; a scalar that its key declares as text stays the text that was written."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel

from ....dataplane.config import encodable
from ...errors import ConfigError

NEEDS_QUOTES = "in a YAML file, text that begins with '#', contains ' #' or ends with ':' needs quotes"


class Loader(yaml.SafeLoader):
    """YAML loader that reads scalars as YAML 1.2 does, and refuses a key that appears twice.

    PyYAML itself follows YAML 1.1, which reads `off` as false, `1e-3` as text and `1:30` as 90.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)


_REPLACED = ("bool", "int", "float", "timestamp")
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))

_TEXT = "tag:yaml.org,2002:str"
_LIKE_TEXT = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
"""Tags of scalars that are text after all if their key declares text."""


def parse_yaml(text: str, where: str, annotation: Any = None) -> Any:
    """Parse YAML and return its value. where: name of the text, for errors. annotation: type of the value, such as the
    class of a section; None if it is unknown. Raises ConfigError if the text is not YAML."""
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _keep_texts(node, annotation, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        hint = f" ({NEEDS_QUOTES})" if "mapping values are not allowed" in str(error.problem) else ""
        raise ConfigError([f"{where}{line}: {error.problem or 'broken'}, expected YAML{hint}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{where}: its values are nested too deeply or contain themselves"]) from error
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML raises ValueError for text that does not fit its tag, such as `!!int abc`.
        raise ConfigError([f"{where}: {error}, expected YAML".replace("\n", " ")]) from error


def _keep_texts(node: yaml.Node, annotation: Any, above: set[int]) -> None:
    """Mark the scalars below `node` that their keys declare as text, so that the loader keeps them as they are written.
    above: ids of the nodes that contain `node`."""
    if id(node) in above:
        raise RecursionError
    if isinstance(node, yaml.ScalarNode):
        if not encodable(node.value):
            problem = f"got {node.value!r}, expected text that UTF-8 can encode"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if node.style is None and node.tag in _LIKE_TEXT and is_text(annotation):
            node.tag = _TEXT
        return
    mapping = isinstance(node, yaml.MappingNode)
    parts = [(key.value, value) for key, value in node.value] if mapping else list(enumerate(node.value))
    for part, value in parts:
        declared = part_annotation(annotation, part) if isinstance(part, str | int) else None
        _keep_texts(value, declared, {*above, id(node)})


# ---------------- These functions find the types of keys.


def annotation_at(location: Sequence[str | int], root: Any) -> Any:
    """Return the annotation of the key at `location` below the annotation `root`.

    Return None if there is no such key, or if keys are free there.
    """
    for part in location:
        root = part_annotation(root, part)
    return root


def part_annotation(annotation: Any, part: str | int) -> Any:
    """Return the annotation of a key of a section, or of an entry of a list or dict; None if it is unknown. In a list,
    `part` is an index or its digits."""
    for one in _alternatives(annotation):
        arguments = typing.get_args(one)
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one.model_fields[part].annotation if part in one.model_fields else None
        if typing.get_origin(one) is dict:
            return arguments[1]
        if typing.get_origin(one) is tuple and str(part).isdigit():
            endless = arguments[-1] is Ellipsis
            return arguments[0] if endless else (*arguments, None)[min(int(part), len(arguments))]
    return None


def section_at(location: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the class of the section at `location` below the class `root`; None if there is no section."""
    for one in _alternatives(annotation_at(location, root)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def is_text(annotation: Any) -> bool:
    """Return whether the annotation of a key takes text, but neither numbers nor booleans."""
    kinds = [one for one in _alternatives(annotation) if one is not type(None)]
    return bool(kinds) and all(one is str or _is_choice_of_texts(one) for one in kinds)


def _is_choice_of_texts(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal and all(isinstance(one, str) for one in typing.get_args(annotation))


def can_be_unset(annotation: Any) -> bool:
    """Return whether the annotation of a key takes null."""
    return type(None) in _alternatives(annotation)


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation alone, without the wrappers `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(annotation) for one in _alternatives(member)]
    return [annotation]
