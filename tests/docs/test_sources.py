"""The generated pages are current, links lead somewhere, and the pages name what the code has."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import headrace
from headrace.cli.arguments import Parser
from headrace.cli.command import parse

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module("docs_sources").generated()


@pytest.mark.parametrize(
    "page",
    [
        "internals/modules.md", "reference/config.md", "start/coming-from.md", "scale/simulate-a-pool.md",
        "training/memory.md", "llms.txt",
    ],
)  # fmt: skip
def test_a_generated_page_is_current(generated: dict[Path, str], page: str) -> None:
    """`make docs-sources` writes it."""
    assert (DOCS / page).read_text(encoding="utf-8") == generated[DOCS / page]


@pytest.mark.parametrize(
    ("model", "gib", "column", "lora", "cell"),
    [
        ("SmolLM2-135M", 80, 1, False, "both"),
        ("Qwen3-0.6B", 140, 1, False, "both"),
        ("Qwen3-0.6B", 140, 2, False, "both"),
        ("Qwen3-4B", 140, 2, False, "both*"),
        ("Qwen3-4B", 140, 1, True, "both*"),
        ("Qwen3-4B", 140, 4, False, "both"),
    ],
)
def test_what_fits_agrees_with_the_runs_on_gpus(model: str, gib: int, column: int, lora: bool, cell: str) -> None:
    """Runs with both roles resident, of docs/benchmarks.md; those of Qwen3-4B recomputed layers."""
    [_, table] = (DOCS / "training" / "memory.md").read_text(encoding="utf-8").split(f"| GPUs of {gib} GiB |")
    row = next(line for line in table.splitlines() if line.startswith(f"| {model} |"))
    place = (1, 2, 4, 8).index(column)
    assert row.split("|")[2 + place].strip().split(" / ")[lora] == cell


def test_the_api_page_lists_exactly_the_public_names() -> None:
    listed = re.findall(r"^::: headrace\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == headrace.__all__


def commands(parser: argparse.ArgumentParser, path: str) -> list[tuple[str, list[str]]]:
    """(command, its options) of all commands below `parser`."""
    found, options = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found += commands(inner, f"{path} {name}")
        options += [option for option in action.option_strings if option.startswith("--")]
    return [(path, options), *found]


def test_the_command_page_names_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has each command, and each option in a table row of its command."""
    made: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(Parser, "parse_known_args", lambda parser, argv: made.append(parser) or sys.exit(0))
    with pytest.raises(SystemExit):
        parse(["doctor"])
    rows = (DOCS / "reference" / "command-line.md").read_text().splitlines()
    for command, options in commands(made[0], "headrace"):
        mentions = " ".join(row for row in rows if row.startswith(f"| `{command}"))
        assert mentions, command
        assert not [option for option in options if option not in mentions and option not in ("--help", "--out")], (
            command
        )


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r'"([\w/-]+\.md)"', nav))


PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """`make docs` checks the site; this also checks what is read on a code host, without a documentation tool."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


GUIDES = [
    page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md", "coming-from.md", "modules.md")
]
"""Pages that are written by hand, or whose generated parts name our own keys."""


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def keys() -> set[str]:
    """Every configuration key, by the pages that are made from the sections' classes."""
    pages = (DOCS / "reference" / "config.md", DOCS / "scale" / "simulate-a-pool.md")
    return {key for page in pages for key in re.findall(r"\*\*`([\w.]+)`\*\*", page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_configuration_key_in_a_page_exists(page: Path) -> None:
    """A span such as `trainer.tp=2` whose first word is a section names a key, a section, or an option. Options stand
    in a key such as `environment.options`."""
    known = keys()
    sections = {key.rpartition(".")[0] for key in known}
    words = " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))).split()
    named = {match[1] for word in words if (match := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?:[=:].*)?", word))}
    named = {key for key in named if key.split(".")[0] in sections and key.split(".")[-1] not in FILES}
    assert not [key for key in named if not {key, key.rpartition(".")[0]} & known and key not in sections]


FILES = ("py", "md", "yaml", "json", "jsonl", "txt", "html")
TURNS = re.compile(
    r"\b((no|every|any)body|anew|(is|are) told|gets on|so that it may|(bytes|tokens|rows?) a|Who (has|knows|does))\b"
)


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    """It has none of the turns that read as translated, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not [match[0] for match in TURNS.finditer(text)]


def test_the_readme_is_short_and_its_example_of_the_plane_is_ten_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    example = text.split('```python title="trainer.py"\n')[1].split("```")[0]
    assert "headrace" in example and len([line for line in example.splitlines() if line.strip()]) <= 10


def test_the_readme_names_every_value_of_the_parts_that_it_lets_choose() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Choose the parts")[1].split("\n## ")[0]
    reference = (DOCS / "reference" / "config.md").read_text(encoding="utf-8")
    compared = 0
    for key, values in re.findall(r"^\| `([\w.]+)` .*?\| (.*) \|$", table, re.MULTILINE):
        if listed := re.search(rf"\*\*`{re.escape(key)}`\*\* \((`.*?);", reference):
            compared += 1
            assert set(re.findall(r"`(\w+)`", listed[1])) - {"auto"} <= set(re.findall(r"`(\w+)`", values)), key
    assert compared == 5


def test_the_first_page_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = (DOCS / "start" / "first-run.md").read_text(encoding="utf-8").split("| extra |")[1].split("\n\n")[0]
    assert extras.keys() <= set(re.findall(r"`([\w-]+)`", table))


def test_benchmarks_are_tables_and_no_diary() -> None:
    assert len((DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_readmes_figures_are_those_of_the_benchmarks_page() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Figures")[1].split("\n## ")[0]
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    figures = {figure for cell in cells for figure in re.findall(r"\d[\d.]*", cell)}
    assert figures
    assert not [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d|\.\d)", measured)]
