"""Every snippet of the README and the documentation is tried: Python runs, YAML loads, commands parse."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from headrace.cli.command import parse
from headrace.trainers.config.load import load_config, read_sections
from headrace.trainers.pool.simulation.config import is_pool_file, pool_file

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TRIED = {"python", "sh", "yaml"}
SHOWN = {"text"}
"""Languages of blocks that show output or a drawing, which nothing can try."""
PLACES = {
    "my.yaml",
    "CONFIG",
    "config.yaml",
    "distill.yaml",
    "tiny.yaml",
    "runs/mine/config.yaml",
    "runs/watched/config.yaml",
}
"""Files of the reader's own, which commands may name."""


@dataclass(frozen=True)
class Snippet:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    """The language and attributes behind the fence, such as `yaml title="prometheus.yml"`."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    found, start, lines = [], 0, page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and start:
            found.append(
                Snippet(page, start, lines[start - 1].removeprefix("```"), "\n".join(lines[start : number - 1]))
            )
            start = 0
        elif line.startswith("```"):
            start = number
    return found


SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


def of(language: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language == language]


def test_every_block_has_a_language_that_says_how_it_is_tried() -> None:
    unknown = [str(snippet) for snippet in SNIPPETS if snippet.language.split(" ")[0] not in TRIED | SHOWN]
    assert not unknown


def starts_processes(snippet: Snippet) -> bool:
    return "process=True" in snippet.text.replace("in_process=True", "")


def python_snippet(snippet: Snippet) -> object:
    """Return the snippet as a parameter, marked if it starts processes, and `slow` if one of its page did so before."""
    marks = []
    if starts_processes(snippet):
        marks.append(pytest.mark.processes)
        first = next(other for other in of("python") if other.page == snippet.page and starts_processes(other))
        if snippet is not first:
            marks.append(pytest.mark.slow)
    return pytest.param(snippet, marks=marks, id=str(snippet))


@pytest.mark.parametrize(
    "snippet", [python_snippet(one) for one in of("python") if not re.search(r"run_training|GRPO\(", one.text)]
)
def test_python_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snippet with `run_training` or `GRPO` starts Ray and a whole run: tests/runs/test_from_python.py runs it."""
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.text, str(snippet), "exec"), {"__name__": "snippet"})


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_of_torchrun_stream_one_partition() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(ROOT / "examples" / "stream_rows.py")], capture_output=True, text=True, timeout=300
    )
    counts = [int(count) for count in re.findall(r"rank \d streamed (\d+) rows", run.stdout)]
    assert run.returncode == 0 and counts == [32, 32], run.stdout + run.stderr


CONFIGURATIONS = [
    *of("yaml"),
    *(block for block in SNIPPETS if re.match(r'yaml title="(?!prometheus)', block.language)),
]


@pytest.mark.parametrize("snippet", CONFIGURATIONS, ids=str)
def test_yaml_is_a_configuration(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads as the file of a run, whose other keys have their defaults, beside the data files that it names."""
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"\w+\.jsonl", snippet.text):
        (tmp_path / name).touch()
    (tmp_path / "run.yaml").write_text(snippet.text)
    load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("snippet", [block for block in SNIPPETS if block.language.startswith("yaml title")], ids=str)
def test_other_yaml_parses(snippet: Snippet) -> None:
    assert yaml.safe_load(snippet.text)


COMMANDS = [
    (snippet, line.split(" #")[0].strip())
    for snippet in of("sh")
    for line in snippet.text.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize(("snippet", "command"), COMMANDS, ids=[f"{snippet} {line}" for snippet, line in COMMANDS])
def test_a_command_is_one_that_exists(snippet: Snippet, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in pieces(shlex.split(command)):
        words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))  # variables before a command
        program = Path(words[0]).name
        assert program in CHECKS, f"{snippet}: {program} is no command that this test knows"
        CHECKS[program](words[1:])


def pieces(words: list[str]) -> list[list[str]]:
    """The commands of a line that joins several by `&&`."""
    text = "\0".join(words)
    return [piece.strip("\0").split("\0") for piece in text.split("&&")]


def check_headrace(words: list[str]) -> None:
    """The arguments parse; a shipped configuration loads with its overrides."""
    arguments = parse(words)
    config = getattr(arguments, "config", None)
    if config is None or config in PLACES | titles():
        return
    if is_pool_file(sections := read_sections(config, arguments.overrides)):
        pool_file(sections)
    else:
        load_config(config, arguments.overrides)


def check_make(words: list[str]) -> None:
    """The target exists, and what ARGS and CONFIG hand to `headrace train` loads."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        pattern = "drill-%" if target.startswith("drill-") else target
        assert re.search(rf"^{pattern}:", makefile, re.MULTILINE), f"make {target}"
    if targets == ["train"]:
        load_config(given.get("CONFIG", "examples/quickstart.yaml"), given.get("ARGS", "").split())


def check_pip(words: list[str]) -> None:
    """Every extra exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"\[([\w,-]+)\]", word):
            assert set(extra.split(",")) <= set(extras), word


def check_file_arguments(words: list[str]) -> None:
    """Scripts and tests that the command names exist: in the repository, in an example, or as blocks of the pages."""
    for word in words:
        if word not in titles() and re.fullmatch(r"[\w/]+(\.py)?", word) and ("/" in word or word.endswith(".py")):
            assert (ROOT / word).exists() or [*(ROOT / "examples").glob(f"*/{word}")], word


def titles() -> set[str]:
    """The names of the files that blocks of the documentation show."""
    return {match[1] for snippet in SNIPPETS if (match := re.search(r'title="(.+)"', snippet.language))}


def nothing(words: list[str]) -> None:
    """Commands of other tools are taken as they are."""


CHECKS = {
    "headrace": check_headrace, "make": check_make, "pip": check_pip, "python": check_file_arguments,
    "pytest": check_file_arguments, "git": nothing, "cd": nothing, "pre-commit": nothing,
    "torchrun": check_file_arguments, "unzip": nothing, "uvx": nothing,
}  # fmt: skip
