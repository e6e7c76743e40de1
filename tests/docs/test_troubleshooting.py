"""The sentences of the page about failures are those that the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("dataplane", "actors", "trainers", "cli")
GAP = "\0"
"""Character in place of what a sentence fills in."""


def rows() -> list[str]:
    """Return the first span of code of each row of the table of likeliest failures."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("## The twenty likeliest failures")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


@pytest.fixture(scope="module")
def sentences() -> str:
    """All texts of the code, one a line."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def pattern(sentence: str) -> str:
    """Return an expression for a text whose constant parts are those of `sentence`, with gaps for each `...`."""
    return ".*?".join(map(re.escape, re.split(r"\.\.\.", sentence)))


def test_there_are_twenty_and_each_is_said_once() -> None:
    assert len(rows()) == 20 == len(set(rows()))


@pytest.mark.parametrize("sentence", rows())
def test_a_sentence_of_the_page_is_one_of_the_code(sentence: str, sentences: str) -> None:
    assert re.search(pattern(sentence), sentences), sentence


def test_a_sentence_that_nothing_says_is_noticed(sentences: str) -> None:
    assert not re.search(pattern("run.dir: ... already contains a run, expected ..."), sentences)
