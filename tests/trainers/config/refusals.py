"""Shared by the tests of the configuration: the sentences with which it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.trainers.config.load import build_config, load_config
from headrace.trainers.errors import ConfigError


def file_problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The problems of a YAML file with this text, which is written into `folder`."""
    path = folder / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


def only_problem(data: dict[str, Any]) -> str:
    """The one problem of a configuration, a single sentence."""
    with pytest.raises(ConfigError) as caught:
        build_config(data)
    [problem] = caught.value.problems
    assert "\n" not in problem
    return problem
