"""Takes over what a script or notebook gives in place of paths: rows, settings, and objects among the settings."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ..config.config import Config
from ..config.load import read_sections, validated
from ..errors import ConfigError
from .shipping import name_of, ship

MAX_ITERATED = 100_000
"""Largest number of rows that are read from an iterator, which can be endless. Lists and data sets have no bound."""
OBJECT_KEYS = ("kind", "sampler", "tools", "script")
"""Last names of the keys whose value can be an object of the script."""
FOLDER = "given"

Rows = Iterable[Mapping[str, Any]] | str | os.PathLike[str]
"""Rows as a list of dicts, an iterator or a `datasets.Dataset`, or what the key `data.train` takes as text."""
Settings = Config | Mapping[str, Any] | str | os.PathLike[str]
"""Configuration as an object, as nested dicts, or as the path of a YAML file."""


def given_sections(settings: Settings | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration as nested dicts, with `changes` applied.

    changes: dotted key -> value; None unsets the key. Objects of the script are shipped, and their paths stand in their
    place.

    Raises ConfigError if the file cannot be read, for an object that cannot be shipped, and for one in another place.
    """
    if isinstance(settings, Config):
        data = settings.model_dump(exclude_defaults=True)
    elif isinstance(settings, Mapping):
        data = settings
    else:
        data = {} if settings is None else read_sections(settings)
    copy = _with_paths(data, "")
    for dotted, value in changes.items():
        _set(copy, dotted, _with_paths(value, dotted))
    return copy


def _with_paths(value: Any, key: str) -> Any:
    """Return a copy of nested dicts and lists with the paths of objects in place of the objects. key: dotted key of the
    value."""
    if isinstance(value, Mapping):
        inner = {str(name): _with_paths(one, f"{key}.{name}".lstrip(".")) for name, one in value.items()}
        per = getattr(value.get("kind"), "per", None)
        return inner if per is None else {"per": per, **inner}
    if isinstance(value, list | tuple):
        return [_with_paths(one, f"{key}.{number}") for number, one in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    takes_objects = next((part for part in reversed(key.split(".")) if not part.isdigit()), "") in OBJECT_KEYS
    if not callable(value):
        if takes_objects and not isinstance(value, str | int | float | None):
            raise ConfigError(
                [f"{key}: got an object of {name_of(value)}, expected a function or a class, or its path"]
            )
        return value
    if not takes_objects:
        raise ConfigError(
            [
                f"{key}: got the object {name_of(value)!r}, expected a plain value, because only rewards, "
                "environments, tools, losses and samplers can be functions or classes"
            ]
        )
    return ship(value, key)


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value of a dotted key in place. A number in the key is an index into a list."""
    names, here = dotted.split("."), data
    for depth, name in enumerate(names):
        at: Any = int(name) if isinstance(here, list) and name.isdigit() else name
        if not isinstance(here, dict) and not (isinstance(here, list) and at in range(len(here))):
            raise ConfigError([f"{dotted}: got {here!r:.80} in front of {name!r}, expected a section with keys"])
        holder: Any = here
        if depth == len(names) - 1:
            holder[at] = value
            return
        if isinstance(here, dict) and here.get(at) is None:
            holder[at] = {}
        here = holder[at]


def reward_sections(rewards: Any) -> list[Any]:
    """Return the value of `reward.functions` for rewards that are functions, classes, names of kinds, or sections."""
    listed = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    return [one if isinstance(one, Mapping) else {"kind": one} for one in listed]


def folder_of_run(sections: Mapping[str, Any]) -> Path:
    """Return the run folder that sections of a configuration name. Raises ConfigError for a wrong section `run`."""
    from ..config.config import with_run_dir

    folder = with_run_dir(validated(Config, {"run": sections.get("run") or {}})).run.dir
    assert folder is not None, "with_run_dir sets it"
    return Path(folder)


class GivenRows:
    """Writes rows to JSONL files in a run folder, named by their digest, which are read as a user's files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._keys: set[str] = set()
        self._made: list[Path] = []
        """Files and folders that did not exist before, in the order in which they can be deleted."""

    def write(self, rows: Rows, key: str) -> str:
        """Write rows, and return the path of their file; text and paths are returned as they are. key: name of the
        rows in errors. Raises ConfigError for what is not a row, and for a value that JSON cannot hold."""
        if isinstance(rows, str | os.PathLike):
            return os.fspath(rows)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable) or hasattr(rows, "iterrows"):
            raise ConfigError(
                [
                    f"{key}: got a {type(rows).__name__}, expected rows: a list of dicts, an iterator of them, one "
                    "split of a dataset, or the path of a file"
                    + ("; `to_dict('records')` makes rows of a table" if hasattr(rows, "iterrows") else "")
                ]
            )
        bounded = rows if hasattr(rows, "__len__") else itertools.islice(rows, MAX_ITERATED)
        self._keys.add(key)
        draft, digest = self._folder / f"{key}.new", xxhash.xxh3_64()
        try:
            self._make(self._folder)
            draft.touch()
        except OSError as error:
            why = f"{self._folder.parent} cannot be written ({error.strerror})"
            raise ConfigError([f"run.dir: {why}, expected a folder to write in"]) from error
        try:
            with draft.open("wb") as file:
                number = -1
                for number, row in enumerate(bounded):
                    line = _encoded(row, f"{key}: row {number}") + b"\n"
                    digest.update(line)
                    file.write(line)
            if number + 1 == MAX_ITERATED and bounded is not rows:
                print(f"note: {key}: the iterator was read up to its row {MAX_ITERATED:,}")
            path = self._folder / f"{key}-{digest.hexdigest()}.jsonl"
            if not path.exists():
                self._made.insert(0, path)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return str(path)

    def holds(self, key: str) -> bool:
        """Return whether rows of that name were written."""
        return key in self._keys

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._make(folder.parent)
            folder.mkdir()
            self._made.insert(0, folder)

    def remove(self) -> None:
        """Delete what was written, after a mistake that has kept the run from starting."""
        for path in self._made:
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            else:
                path.unlink(missing_ok=True)
        self._made.clear()


def _encoded(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError([f"{where} is a {type(row).__name__}, expected a dict from column to value"])
    try:
        return json.dumps(dict(row), default=_plain).encode()
    except (TypeError, ValueError):
        for name, value in row.items():
            if not _fits(value):
                raise ConfigError(
                    [f"{where}, column {name!r} has a {type(value).__name__}, expected what JSON can hold"]
                ) from None
        raise ConfigError([f"{where} has the columns {list(row)!r:.200}, expected names that are text"]) from None


def _plain(value: Any) -> Any:
    """Return an array, tensor or number of another library as lists and numbers."""
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"a {type(value).__name__} is not JSON")
    return to_list()


def _fits(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except (TypeError, ValueError):
        return False
    return True
