"""The page about reliability has the table that the drill goes by."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests.drills.chaos.drill import main, promises

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_promises_what_the_benchmark_expects():
    assert "\n".join(promises()) in (DOCS / "reliability" / "what-a-run-survives.md").read_text(encoding="utf-8")


def test_mistakes_exit_2_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0"]) == 2
    assert "--minutes: got 0, expected a number above 0" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path)]) == 2
    assert "is not empty, expected a new folder" in capsys.readouterr().err
