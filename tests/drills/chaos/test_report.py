"""The page about reliability has the table that the drill goes by."""

from __future__ import annotations

from pathlib import Path

from headrace.tests.drills.chaos.drill import promises

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_promises_what_the_benchmark_expects():
    assert "\n".join(promises()) in (DOCS / "reliability" / "what-a-run-survives.md").read_text(encoding="utf-8")
