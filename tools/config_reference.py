"""Renders the configuration reference and the table of other libraries' keys, for `docs_sources.py`.

Keys are list entries instead of table rows, because a table with a column of long keys does not fit on a phone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.trainers.config.absent_peers import WITHOUT_COUNTERPART
from headrace.trainers.config.config import Config
from headrace.trainers.config.effects import EFFECTS, shown
from headrace.trainers.config.peers import PEERS


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration, or one section."""

    name: str
    """Dotted name. `N` in it stands for an index into a list, and `NAME` for a name that the user chooses."""
    type: str
    """Type and bounds in words; empty for a section."""
    default: str
    """Default value in YAML; empty for a section and for a required key."""
    description: str
    """Docstring of the key or section, on one line."""
    effect: str
    """Conditions under which the key has an effect, in words; empty if the key has an effect in every run."""


def walk_keys(sections: Mapping[str, type[BaseModel]]) -> Iterator[Key]:
    """Yield every section of `sections` (name -> class) and all its keys, in the order of their declaration."""
    for name, section in sections.items():
        yield Key(name, "", "", _one_line(section.__doc__), "")
        yield from _keys_of(section, f"{name}.")


def run_sections() -> dict[str, type[BaseModel]]:
    """Return the sections of a run's configuration: name -> class. The section that can occur several times has the
    name `evaluation.NAME`."""
    sections = {}
    for name, field in Config.model_fields.items():
        section = _section_in(field.annotation)
        if section is not None:
            sections[f"{name}.NAME" if typing.get_origin(field.annotation) is dict else name] = section
    return sections


START_HERE = (
    "run.dir",
    "run.seed",
    "model.path",
    "data.train",
    "data.validation",
    "data.prompt_field",
    "data.answer_field",
    "data.answer_pattern",
    "data.system_prompt",
    "data.chat_template",
    "data.max_prompt_tokens",
    "environment.kind",
    "environment.options",
    "rollout.engine",
    "rollout.num_engines",
    "rollout.tp",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "reward.functions",
    "algorithm.mode",
    "algorithm.steps",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.max_staleness",
    "loss.kind",
    "loss.kl_coef",
    "trainer.backend",
    "trainer.dp",
    "trainer.tp",
    "trainer.lr",
    "trainer.warmup_steps",
    "trainer.mixed_precision",
    "trainer.tokens_per_microbatch",
    "trainer.recompute",
    "dataplane.store.capacity_mib",
    "validation.every",
    "validation.num_prompts",
    "validation.metric",
    "logging.trackers",
    "resources.layout",
)
"""The forty keys to read first, for a first run with your own model, data and reward."""


def reference_markdown(tools: Mapping[str, type[BaseModel]] = types.MappingProxyType({})) -> str:
    """Return the configuration reference as Markdown: the keys to read first, then all keys, section by section.

    tools: further sections of the configuration file that only tools read, such as `{"simulation": SimulationConfig}`.
    """
    sections = {**run_sections(), **tools}
    return f"{start_markdown(sections)}\n\n{keys_markdown(sections)}\n"


def start_markdown(sections: Mapping[str, type[BaseModel]]) -> str:
    """Return, as a Markdown table, the keys of START_HERE with the first sentence of their meaning."""
    meanings = {key.name: key.description for key in walk_keys(sections)}
    lines = ["## Start here", "", f"Most runs set a few of these {len(START_HERE)} keys and leave the rest.", ""]
    lines += [_row("Key", "Meaning"), _row("---", "---")]
    lines += [_row(f"`{key}`", _first_sentence(meanings[key])) for key in START_HERE]
    return "\n".join(lines)


def keys_markdown(sections: Mapping[str, type[BaseModel]], level: str = "##") -> str:
    """Return a Markdown list of keys for each of `sections` (name -> class). level: Markdown prefix of the headings."""
    lines: list[str] = []
    for key in walk_keys(sections):
        if not key.type:
            lines += ["", f"{level} `{key.name}`", "", key.description, ""]
            continue
        default = f"; default `{key.default}`" if key.default else "; required"
        first = "; start here" if key.name in START_HERE else ""
        effect = f" Has an effect only with {key.effect}." if key.effect else ""
        lines.append(f"- **`{key.name}`** ({key.type}{default}{first}): {key.description}{effect}")
    return "\n".join(lines[1:])


def peers_markdown() -> str:
    """Return the Markdown tables of all libraries."""
    parts = []
    for library, rows in PEERS.items():
        lines = [f"\n## {library}\n\n| {library} | Headrace | |\n| --- | --- | --- |\n"]
        for theirs, ours, note in rows:
            lines.append(f"| `{theirs}` | {', '.join(f'`{key}`' for key in ours.split())} | {note} |\n")
        if absent := WITHOUT_COUNTERPART.get(library):
            lines.append(f"\nThese settings of {library} have no key here:\n\n| {library} | why |\n| --- | --- |\n")
            whys = dict.fromkeys(absent.values())
            lines += [f"| {', '.join(f'`{n}`' for n in absent if absent[n] == why)} | {why} |\n" for why in whys]
        parts.append("".join(lines))
    return "".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.]) (?=[A-Z`0-9])", text, maxsplit=1)[0]


# ---------------- These functions describe the keys of one section.


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    described = descriptions(section)
    for name, field in section.model_fields.items():
        below = _section_in(field.annotation)
        listed = typing.get_origin(field.annotation) is tuple
        if below is None or below is not field.annotation:
            effect = " and ".join(need.words for need in EFFECTS.get(prefix + name, ()))
            kind = "list of sections" if listed else "section or unset"
            if below is None:
                kind = _annotation_name(field.annotation) + _bounds(field.metadata)
            yield Key(prefix + name, kind, _default(field), described.get(name, ""), effect)
        if below is not None:
            yield from _keys_of(below, f"{prefix}{name}{'.N' if listed else ''}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


@functools.cache
def descriptions(section: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings of a section's keys, each on one line: key -> docstring. Keys of base sections come
    first."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]).body
    found: dict[str, str] = {}
    for base in section.__bases__:
        if base is not BaseModel and issubclass(base, BaseModel):
            found |= descriptions(base)
    for declared, text in zip(body, body[1:], strict=False):
        match declared, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = _one_line(words)
    return found


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default()
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(entry) for entry in value) + "]"
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        return yaml.safe_dump(value.model_dump(exclude_unset=True), default_flow_style=True).strip()
    return (value or '""') if isinstance(value, str) else shown(value)


_PLAIN_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _annotation_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        metadata = [part for entry in arguments[1:] for part in getattr(entry, "metadata", [entry])]
        return _annotation_name(arguments[0]) + _bounds(metadata)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("unset" if part is type(None) else _annotation_name(part) for part in arguments)
    if origin is tuple:
        entries = [_annotation_name(part) for part in arguments if part is not ...]
        return f"list of {entries[0]}" if ... in arguments else f"[{', '.join(entries)}]"
    if origin is dict:
        return "keys and values"
    return _PLAIN_TYPES[annotation]


def _bounds(metadata: typing.Iterable[Any]) -> str:
    found = [
        f" {sign} {getattr(part, name):.10g}"
        for part in metadata
        for name, sign in _BOUNDS.items()
        if hasattr(part, name)
    ]
    return " and".join(found)
