"""A corpus of malformed configurations, data files, rewards and environments, made by mutation of good ones.

Each of them ends a dry run with exit code 2 and sentences that name the key, or the file and line, or it has the right
result. None leaves a traceback or a file behind.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import sys
import typing
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import main
from headrace.trainers.config.config import Config
from headrace.trainers.config.values.overrides import override_value
from headrace.trainers.config.values.yaml_values import annotation_at, is_text, section_at

GOOD = {
    "model": {"path": "./model"},
    "data": {"train": "./good.jsonl", "validation": "./good.jsonl", "max_prompt_tokens": 40},
    "rollout": {"max_new_tokens": 10},
    "algorithm": {"steps": 2, "prompts_per_step": 4, "group_size": 2},
    "reward": {"functions": [{"kind": "good_reward:score"}]},
    "environment": {"kind": "good_environment:play"},
    "evaluation": {"hard": {"data": {"source": "./good.jsonl"}}},
    "logging": {"trackers": ["tensorboard"], "tensorboard": False},
}
ROW = {"prompt": [{"role": "user", "content": "r12="}], "answer": "21", "level": 1}
REWARD = "def score(prompt, response, finish_reason):\n    return 1.0\n"
ENVIRONMENT = "async def play(episode):\n    await episode.generate()\n"


@dataclass(frozen=True)
class Case:
    """One mutation of the good run."""

    name: str
    overrides: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()
    """Name and content of the files that it writes."""
    named: tuple[str, ...] = ()
    """Texts of which a sentence must have one."""
    key: str = ""
    """Key whose value, where it is taken, is the one that was typed."""
    must_fail: bool = False


# ---------------------------------------------------------------- mutations


WRONG = (
    "",
    "abc",
    "-1",
    "0",
    ".nan",
    "1e999",
    "[]",
    "{a: 1}",
    "null",
    "true",
    "#### x",
    "a: b",
    "[1",
    "\ud800",
    "99999999",
)
"""Values that most keys cannot have."""


def keys(section: Any = Config, above: str = "") -> Iterator[str]:
    """Every key of the configuration, with an entry of each list and dict of sections."""
    for name, field in section.model_fields.items():
        at = above + name
        yield at
        inner = section_at([name], section)
        if inner is None:
            part = "hard" if typing.get_origin(field.annotation) is dict else "0"
            inner, at = section_at([name, part], section), f"{at}.{part}"
        if inner is not None and (at.rpartition(".")[2] != "0" or at in ("reward.functions.0", "logging.trackers.0")):
            yield from keys(inner, f"{at}.")


def configurations() -> Iterator[Case]:
    """Each key with a wrong value, and with a misspelt name."""
    for number, key in enumerate(keys()):
        section, _, last = key.rpartition(".")
        for text in (WRONG[number % len(WRONG)], WRONG[(7 * number + 3) % len(WRONG)]):
            yield Case(f"{key}={text!r}", (f"{key}={text}",), named=(key, last, section or key), key=key)
        if number % 4 == 0:
            typo = f"{section}.{last[:-1]}x{last[-1]}" if section else f"{last[:-1]}x{last[-1]}"
            yield Case(f"{typo}=1", (f"{typo}=1",), named=(typo,), must_fail=True)


def data_files() -> Iterator[Case]:
    """A file whose third line is a damaged row."""
    line = json.dumps(ROW)
    good = (line + "\n\n").encode()
    whole = [line[: len(line) * part // 5].encode() for part in range(1, 5)]
    whole += [
        b"[1]",
        b"3",
        b"null",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"{'prompt': 'a'}",
        line.encode() + b"," + line.encode(),
    ]
    for at, damaged in enumerate(whole):
        yield Case(f"line {at}", files=(("good.jsonl", good + damaged),), named=("line 3 of", "utf-8"), must_fail=True)
    wrong = ("", None, 3, True, [], {}, [3], [[]], [{}], float("nan"), float("inf"), "\ud800", {"a": "b"}, "x" * 99)
    for field, value in itertools.product(("prompt", "answer"), wrong):
        damaged = json.dumps({**ROW, field: value}).encode()
        taken = field == "answer" and (value is None or isinstance(value, (int, str)) and value != "\ud800")
        yield Case(
            f"{field}={value!r}", files=(("good.jsonl", good + damaged),), named=("line 3 of",), must_fail=not taken
        )
    [message] = ROW["prompt"]  # type: ignore[misc]
    for field, value in itertools.product(("role", "content"), ("", None, 3, [], {}, [3], "\ud800")):
        damaged = json.dumps({**ROW, "prompt": [{**message, field: value}]}).encode()
        yield Case(
            f"message {field}={value!r}", files=(("good.jsonl", good + damaged),), named=("line 3 of",), must_fail=True
        )
    for field, other in itertools.product(("role", "content"), ("from", "value", "text", "speaker")):
        renamed = {other if key == field else key: value for key, value in message.items()}
        damaged = json.dumps({**ROW, "prompt": [renamed]}).encode()
        yield Case(f"{field} is {other}", files=(("good.jsonl", good + damaged),), named=("line 3 of",), must_fail=True)
    for field in ("prompt", "answer"):
        damaged = json.dumps({f"{key}x" if key == field else key: value for key, value in ROW.items()}).encode()
        yield Case(f"no {field}", files=(("good.jsonl", good + damaged),), named=("line 3 of",), must_fail=True)


def modules(name: str, good: str, arguments: tuple[str, ...], key: str) -> Iterator[Case]:
    """A user's module whose function has other arguments, or which cannot be imported."""
    head = f"{'async ' * good.startswith('async')}def {good.split('def ')[1].split('(')[0]}"
    taken = ", ".join(arguments)
    orders = [", ".join(order) for order in itertools.permutations(arguments) if order != arguments]
    fewer = [", ".join(arguments[:count]) for count in range(len(arguments))]
    renamed = [taken.replace(one, f"{one}_x") for one in arguments if len(arguments) > 1]
    if len(arguments) > 1:
        renamed += ["completions, **kwargs", "data_source, solution_str, ground_truth", "queries, prompts, labels"]
    for at, wrong in enumerate([*orders, *fewer, *renamed, f"{taken}, more", f"*, {taken}"]):
        text = f"{head}({wrong}):\n    return 1.0\n"
        yield Case(f"{name} {at}", files=((f"{name}.py", text.encode()),), named=(key,), must_fail=True)
    broken = [
        "(",
        "import no_such",
        "raise SystemExit(3)",
        "raise KeyError",
        "raise BaseException",
        "1 / 0",
        "x = 3",
        "\0",
    ]
    for text in (*broken, good.replace("def ", "def other_"), f"{head.split()[-1]} = 3", good.replace(":\n", "\n")):
        yield Case(f"{name} {text!r}", files=((f"{name}.py", text.encode()),), named=(key,), must_fail=True)
    kind = f"{head.split()[-1]}"
    for text in (f"class {kind}: pass", f"class {kind}:\n    def __init__(self, needed): pass"):
        yield Case(f"{name} {text!r}", files=((f"{name}.py", text.encode()),), named=(key,), must_fail=True)


_MADE = (
    configurations(),
    data_files(),
    modules("good_reward", REWARD, ("prompt", "response", "finish_reason"), "reward.functions"),
    modules("good_environment", ENVIRONMENT, ("episode",), "environment."),
)
CASES = [*{case.name: case for case in itertools.chain(*_MADE)}.values()]
SAMPLE = random.Random(3).sample(CASES, 24)


# ---------------------------------------------------------------- the run


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the good run."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "good.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "good_reward.py").write_text(REWARD)
    (tmp_path / "good_environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def dry_run(*overrides: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a dry run with the modules as they are now."""
    for module in ("good_reward", "good_environment"):
        sys.modules.pop(module, None)
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = main(["train", "run.yaml", "run.dir=run", "--dry-run", *overrides])
    return code, output.getvalue(), errors.getvalue()


def fault(case: Case, place: Path) -> str:
    """What is wrong about the answer to a case; "" if nothing is."""
    kept = {name: (place / name).read_bytes() for name, _ in case.files}
    for name, content in case.files:
        (place / name).write_bytes(content)
    before = sorted(place.iterdir())
    try:
        code, output, errors = dry_run(*case.overrides)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        for name, content in kept.items():
            (place / name).write_bytes(content)
    if sorted(place.iterdir()) != before:
        return "it left files behind"
    if code == 2:
        lines = errors.splitlines()
        if not lines or not all(line.startswith("headrace: ") for line in lines):
            return f"not a sentence a line: {errors[:300]}"
        return "" if any(one in line for line in lines for one in case.named) else f"names nothing: {errors[:300]}"
    if code or case.must_fail:
        return f"exit code {code}: {errors[-300:]}"
    if case.key:
        typed = override_value(case.overrides[0].partition("=")[2], annotation_at(case.key.split("."), Config), "")
        found: Any = yaml.safe_load(output.partition("\nconfiguration\n")[2])
        for part in case.key.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        if is_text(annotation_at(case.key.split("."), Config)) and found != typed and case.key != "run.dir":
            return f"got {found!r} for {typed!r}"
    return ""


def faults(cases: list[Case], place: Path) -> dict[str, str]:
    code, output, errors = dry_run()
    assert (code, errors) == (0, "") and "plan of a step" in output
    return {case.name: found for case in cases if (found := fault(case, place))}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_sample_of_the_corpus_is_told_in_sentences(place: Path) -> None:
    assert len(CASES) >= 200
    assert faults(SAMPLE, place) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_whole_corpus_is_told_in_sentences(place: Path) -> None:
    assert faults(CASES, place) == {}
