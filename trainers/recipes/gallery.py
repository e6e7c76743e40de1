"""Finds the recipes: folders of `examples/` with a configuration, a page on it, and what stands in for its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...dataplane.section import Section
from ..errors import UserError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class RecipeFile(Section):
    """The content of a recipe's recipe.yaml."""

    summary: str
    """What is trained on what, in a few words."""
    hardware: str
    """Machine that the configuration is made for, in a few words."""
    machine: str | None = None
    """The same machine as `headrace train --dry-run --machine` takes it. Unset: any machine without GPUs."""
    model: dict[str, Any] = {}
    """Content of the model's config.json, from which a stand-in of the same shape is made. Empty: the recipe makes its
    model itself."""
    rows: dict[str, tuple[dict[str, Any], ...]] = {}
    """Key of a source of prompts (`data.train`) -> rows with the columns of the data set that it names."""
    small: dict[str, Any] = {}
    """Dotted keys of the configuration, and their values in the scaled-down form, besides those of every recipe."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe."""

    name: str
    """Name of its folder."""
    folder: Path
    file: RecipeFile

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.folder / "config.yaml"


def recipes() -> Mapping[str, Recipe]:
    """Return all recipes by name, in alphabetical order."""
    found = {}
    for path in sorted(EXAMPLES.glob("*/recipe.yaml")):
        content = RecipeFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        found[path.parent.name] = Recipe(path.parent.name, path.parent, content)
    return found


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`. Raises UserError if there is none."""
    known = recipes()
    if name not in known:
        raise UserError(f"recipe: got {name!r}, expected one of {', '.join(known)}")
    return known[name]
