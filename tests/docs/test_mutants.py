"""The table of mutants fits the code of today, and the tests kill what it holds."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module("mutants")


def test_the_text_of_every_mutant_is_in_its_file_once(mutants: ModuleType) -> None:
    """A change or move of code that a mutant replaces, or of its tests, changes the table too."""
    counts = {mutant.name: (ROOT / mutant.path).read_text().count(mutant.old) for mutant in mutants.MUTANTS}
    assert len(counts) == len(mutants.MUTANTS) >= 22
    assert {name: count for name, count in counts.items() if count != 1} == {}
    tests = {path for mutant in mutants.MUTANTS for path in mutant.tests.split()}
    assert [path for path in sorted(tests) if not (ROOT / path).exists()] == []


def test_random_mutants_are_other_programs(mutants: ModuleType) -> None:
    """Each is drawn by the seed alone, and is Python that means something else."""
    changes = mutants.random_mutants.draw(ROOT, 30, seed=5)
    assert changes == mutants.random_mutants.draw(ROOT, 30, seed=5)
    for change in changes:
        text = (ROOT / change.path).read_bytes()
        assert ast.dump(ast.parse(change.apply(text))) != ast.dump(ast.parse(text)), change


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_the_tests_kill_the_mutants(mutants: ModuleType) -> None:
    assert mutants.main([]) == 0
