"""Three families of different kinds pass all checks, the list is complete, and the table says what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from headrace.tests.trainers.families import checks, table
from headrace.tests.trainers.families.checks import Outcome, outcome_of
from headrace.tests.trainers.families.mesh_checks import record_of, run_family
from headrace.tests.trainers.families.tiny_models import FAMILIES, LENGTHS, VARIANTS, WITH_EXPERTS, save_family

ONE_RANK = ("trains", "engine")


@pytest.mark.processes
@pytest.mark.parametrize(("name", "features"), [
    ("gemma3_text", ("packed", "tp2", "cp2")), ("qwen3_moe", ("packed", "tp2", "ep2", "cp2", "replay")), ("lfm2", ()),
])  # fmt: skip
def test_a_family(tmp_path: Path, name: str, features: tuple[str, ...]) -> None:
    """Windows, experts, and layers without attention, whose rows cannot be packed."""
    record = run_family(name, tmp_path)
    assert all(record[feature] for feature in (*ONE_RANK, *features)), record["why"]
    assert all(record["checks"][check]["state"] != "wrong" for check in ("padded", "packed", "tp2", "cp2"))


@pytest.mark.long
def test_a_wrong_weight_shows(tmp_path: Path) -> None:
    checks.quiet()
    case = checks.OneRank(save_family(tmp_path, "llama"), "llama")
    trainer = case.build()
    error, gradient = checks.check_logprobs(trainer, case), checks.check_gradient(trainer, case)
    assert isinstance(error, float) and 0 < error <= checks.LOGPROBS, "the figures are not those of a comparison"
    assert isinstance(gradient, float) and 0 < gradient <= checks.GRADIENT
    with torch.no_grad():
        trainer._policy.model.model.norm.weight[0] += 1e-2
    for check in (checks.check_logprobs, checks.check_gradient):
        found = outcome_of(lambda check=check: check(trainer, case), 0.0)
        assert found.state == "wrong" and found.figure is not None and found.figure > 1e-4, found


def test_the_list_has_sixty_families_of_transformers() -> None:
    assert len(FAMILIES) == 60 and set(FAMILIES) <= set(CONFIG_MAPPING)
    assert set(FAMILIES) >= WITH_EXPERTS and set(VARIANTS) >= LENGTHS
    assert all(name.split()[0] in FAMILIES and " " in name for name in VARIANTS), "variants do not count"


def raising(error: Exception) -> Any:
    raise error


def test_an_outcome_says_what_happened() -> None:
    assert outcome_of(lambda: 1e-6, 1e-5) == Outcome("passed", 1e-6)
    assert outcome_of(lambda: 2e-5, 1e-5) == Outcome("wrong", 2e-5, "2e-05, above 1e-05")
    assert outcome_of(lambda: float("nan"), 1e-5).state == "wrong"
    assert outcome_of(lambda: raising(ValueError("No. Please do\nmore")), 1) == Outcome("refused", why="No.")
    assert outcome_of(lambda: raising(KeyError("x")), 1) == Outcome("crashed", why="KeyError: 'x'")


def test_the_table_says_what_was_found() -> None:
    good = dict.fromkeys(("padded", "gradient", "step", "export", "resume", "packed", "packed gradient", "engine"))
    found = {name: Outcome("passed", 2e-6) for name in good} | {"tp2": Outcome("passed", 3e-6)}
    records = {"llama": record_of({**found, "cp2": Outcome("refused", why="a | b")}, 1.0)}
    rounded = {"gradient": Outcome("rounding", 2e-6), "tp2": Outcome("wrong", 1e-2, "1e-02, above 1e-05")}
    records["mixtral"] = record_of({**found, **rounded, "ep2": Outcome("crashed", why="KeyError: 'x'")}, 2.0)
    records["llama llama3"] = record_of({"padded": Outcome("wrong", 1.0, "1e+00, above 1e-05")}, 1.0)
    page = table.filled(f"# Models\n\n{table.BEGIN}old\n{table.END}The end.\n", records)
    assert page.startswith(f"# Models\n\n{table.BEGIN}\nWith transformers ") and page.endswith(f"{table.END}The end.\n")
    assert "2 of 2 families train, 1 at tp 2, 0 at ep 2, 0 at cp 2." in page and "old" not in page
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head, _, llama, mixtral, variant = rows
    assert len(head) == len(llama) == len(mixtral) == 11
    assert llama[:10] == ["llama", "yes", "2e-06", "2e-06", "2e-06", "3e-06", "", "refused", "2e-06", ""]
    assert llama[10] == "cp2 refused: a \\| b"
    assert mixtral[1:8] == ["yes", "2e-06", "2e-06", "2e-06*", "**1e-02**", "**crashed**", "not run"]
    assert variant[:3] == ["llama llama3", "**no**", "**1e+00**"]
    assert records["mixtral"]["why"] == "tp2 wrong: 1e-02, above 1e-05; ep2 crashed: KeyError: 'x'"
    absent = record_of(dict.fromkeys(("padded", "step", "tp2"), Outcome("refused", why="No.")), 1.0)
    assert absent["why"] == "training refused: No." and not absent["trains"]
    assert {name: records["llama"][name] for name in ("trains", "tp2", "ep2", "cp2", "packed", "engine")} == {
        "trains": True, "tp2": True, "ep2": False, "cp2": False, "packed": True, "engine": True,
    }  # fmt: skip
