"""`import headrace` offers the public names, and loads nothing heavy before one of them is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", headrace.__all__)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert (getattr(headrace, name).__doc__ or "").strip()
    assert name in dir(headrace)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under `if TYPE_CHECKING` and `__all__` name the same things from the same modules."""
    [block] = [node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    [whole, *imports] = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert whole.module is None and [alias.name for alias in whole.names] == ["rewards"], "the only public module"
    assert headrace.rewards is sys.modules["headrace.rewards"]
    module_of = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted([*module_of, "rewards"]) == headrace.__all__ == sorted(headrace.__all__)
    for name, module in module_of.items():
        assert getattr(headrace, name) is getattr(sys.modules[f"headrace.{module}"], name)


def test_every_data_plane_error_is_public() -> None:
    from headrace.dataplane import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in classes if issubclass(vars(errors)[name], Exception)} <= set(headrace.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'conect'"):
        headrace.conect  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.processes
def test_importing_headrace_imports_nothing_heavy() -> None:
    code = (
        "import sys, headrace\n"
        "heavy = {'torch', 'numpy', 'ray', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
