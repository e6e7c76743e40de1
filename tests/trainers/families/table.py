"""Runs all checks of all families, and writes `build/families.json` and the table of docs/reference/models.md.

    python -m headrace.tests.trainers.families.table [FAMILY ...]

Without names it runs all families and writes the table. With names it runs these, and only replaces their records.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.tests.trainers.families import mesh_checks
from headrace.tests.trainers.families.tiny_models import FAMILIES, VARIANTS, WITH_EXPERTS
from headrace.tests.trainers.families.vllm_check import SERVED

ROOT = Path(__file__).parent.parent.parent.parent
RECORDS = ROOT / "build" / "families.json"
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: made by make families -->\n", "<!-- end of the table -->\n"
COLUMNS = ("padded", "packed", "gradient", "tp2", "ep2", "cp2", "engine", "replay")
"""Checks that have a column of their own, in the order of the table."""
HEAD = ("family", "trains", "padded", "packed", "gradient", "tp 2", "ep 2", "cp 2", "engine", "replay", "why not")


def main(names: Sequence[str]) -> int:
    """Run the families `names`, or all; returns the exit code, 1 if a name is unknown."""
    known = [*FAMILIES, *VARIANTS]
    if unknown := [name for name in names if name not in known]:
        print(f"families: got {unknown[0]!r}, expected some of {', '.join(known)}")
        return 1
    begun = time.monotonic()
    found = run_families(names or known)
    old = json.loads(RECORDS.read_text(encoding="utf-8")) if names and RECORDS.exists() else {}
    records = {name: {**old, **found}[name] for name in known if name in {*old, *found}}
    RECORDS.parent.mkdir(exist_ok=True)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if not names:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    print(f"{len(found)} models in {(time.monotonic() - begun) / 60:.1f} minutes; {RECORDS.relative_to(ROOT)}")
    return 0


def run_families(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run all checks of some families, two at a time, and print a line for each; returns their records. As long as one
    lane waits for vLLM, the other one runs the families that are not served with it."""
    multiprocessing.set_forkserver_preload([mesh_checks.__name__])
    found: dict[str, dict[str, Any]] = {}
    served, others = iter([name for name in names if name in SERVED]), iter([one for one in names if one not in SERVED])

    def lane(*sources: Iterator[str]) -> None:
        while name := next((one for source in sources for one in source), None):
            found[name] = record = _run(name)
            print(f"{name} ({record['seconds']:.0f} s): {record['why'] or 'all checks hold'}", flush=True)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(lane, served, others), pool.submit(lane, others, served)]:
            done.result()
    return found


def _run(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return mesh_checks.run_family(name, Path(folder), serve=find_spec("vllm") is not None)


# ---------------------------------------------------------------- the page


def filled(page: str, records: Mapping[str, Any]) -> str:
    """Return the text of the page with the table of `records` (family -> record) between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(records)}\n{END}{rest.partition(END)[2]}"


def table(records: Mapping[str, Any]) -> str:
    """Return, as Markdown, a line with versions and numbers, and a row for each record."""
    families = [record for name, record in records.items() if name in FAMILIES]
    counts = [f"{sum(record['trains'] for record in families)} of {len(families)} families train"]
    counts += [f"{sum(one[mesh] for one in families)} at {mesh[:2]} 2" for mesh in mesh_checks.MESHES]
    versions = " and ".join(f"{package} {version(package)}" for package in ("transformers", "torch"))
    lines = [f"With {versions}: {', '.join(counts)}.\n", row(HEAD), row(["---"] * len(HEAD))]
    return "\n".join([*lines, *(row(cells(name, record)) for name, record in records.items())]) + "\n"


def row(parts: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(parts)} |"


def cells(name: str, record: Mapping[str, Any]) -> list[str]:
    """Return the cells of one record."""
    checks: Mapping[str, Any] = record["checks"]
    values = [cell(checks.get(check)) if _applies(check, name) else "" for check in COLUMNS]
    if "vllm" in checks:
        values[COLUMNS.index("engine")] += f", vLLM {cell(checks['vllm'])}"
    # A line of the table, and signs that Markdown would read.
    why = "".join(f"\\{sign}" if sign in "|*_<`" else sign for sign in record["why"])
    return [name, "yes" if record["trains"] else "**no**", *values, why]


def _applies(check: str, name: str) -> bool:
    return check not in ("ep2", "replay") or name in WITH_EXPERTS


def cell(outcome: Mapping[str, Any] | None) -> str:
    """Return what the table says of a check: its figure, in bold if it is too large, or its state."""
    if outcome is None:
        return "not run"
    figure, state = outcome["figure"], outcome["state"]
    if figure is None:
        return f"**{state}**" if state in ("wrong", "crashed") else state
    text = f"{figure:.0e}"
    return {"wrong": f"**{text}**", "rounding": f"{text}*"}.get(state, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
