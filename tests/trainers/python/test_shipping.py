"""Objects of a script are shipped under a digest of their sources and values, or refused by what they hold."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataplane import imports
from headrace.dataplane.imports import import_object, ship_objects, shipped_objects
from headrace.testing import rows
from headrace.trainers.config.object_files import read_objects, write_objects
from headrace.trainers.errors import ConfigError, UserError
from headrace.trainers.python.shipping import MAX_BYTES, ship


@pytest.fixture(autouse=True)
def objects() -> Iterator[None]:
    """Each test begins and ends without shipped objects."""
    imports._shipped.clear()
    imports._loaded.clear()
    yield
    imports._shipped.clear()
    imports._loaded.clear()


def a_reward(factor: float, note: str = "") -> Any:
    def score(prompt: Any, response: str, finish_reason: str) -> float:
        return factor * len(response) + math.floor(0.5) + len(note)

    return score


def digest(value: Any) -> str:
    return ship(value, "reward.functions").partition(":")[0]


def test_a_function_is_loaded_with_what_it_holds() -> None:
    path = ship(a_reward(2.0), "reward.functions")
    assert path.startswith("object@") and path.endswith(":score")
    assert import_object(path, "reward.functions")(None, "abc", "stop") == 6.0
    assert import_object(path, "reward.functions") is import_object(path, "reward.functions")


def test_the_digest_is_that_of_source_and_values() -> None:
    assert digest(a_reward(2.0)) == digest(a_reward(2.0))
    assert len({digest(one) for one in (a_reward(2.0), a_reward(3.0), a_reward(2.0, "longer"), rows)}) == 4
    # The source of a lambda shares its lines with other statements, which say nothing about it.
    first = (lambda response: len(response), 1)[0]
    second = (lambda response: len(response), 2)[0]
    assert digest(first) == digest(second) != digest(lambda response: len(response) + 1)


def test_the_digest_covers_methods_bases_defaults_and_the_state_of_an_object() -> None:
    def make(base: float, default: float, state: float) -> Any:
        class Base:
            def scale(self) -> float:
                return base

        class Judge(Base):
            def __init__(self, state: float) -> None:
                self.state = [{"of": state}]

            def __call__(self, response: str, *, bonus: float = default) -> float:
                return self.scale() + bonus + self.state[0]["of"]

        return Judge(state)

    made = [make(1.0, 2.0, 3.0), make(9.0, 2.0, 3.0), make(1.0, 9.0, 3.0), make(1.0, 2.0, 9.0)]
    assert len({digest(one) for one in made}) == 4 and digest(made[0]) == digest(make(1.0, 2.0, 3.0))
    assert import_object(ship(made[0], "f"), "f")("") == 6.0
    assert digest(functools.partial(a_reward(1.0), note="a")) != digest(functools.partial(a_reward(1.0), note="b"))


def test_the_digest_covers_tensors_slots_and_tables() -> None:
    @dataclasses.dataclass(slots=True)
    class Scale:
        by: float

    def holding(value: Any) -> Any:
        return lambda: value

    def module(scale: float) -> torch.nn.Module:
        made = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(made.weight, scale)
        torch.nn.init.zeros_(made.bias)
        return made

    of_numbers: list[Callable[[float], Any]] = [
        torch.tensor,
        lambda number: torch.tensor([number], dtype=torch.bfloat16),
        module,
        Scale,
        lambda number: [number, "x"],
        lambda number: {"x": number},
        lambda number: collections.Counter(x=int(number)),
    ]
    for make in of_numbers:
        assert digest(holding(make(1.0))) == digest(holding(make(1.0))) != digest(holding(make(2.0)))


@pytest.mark.processes
def test_the_digest_of_sets_tensors_and_slots_is_the_same_in_each_process() -> None:
    code = (
        "import torch\nfrom headrace.trainers.python.shipping import ship\nwords = {'one', 'two', 'three', 'four'}\n"
        "class Slots:\n    __slots__ = ('a',)\nheld = Slots()\nheld.a = torch.ones(2)\n"
        "print(ship(lambda response: response in words or response in {'a', 'b', 'c', 'd'} or held, 'f'))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in "123"
    }
    assert len(said) == 1 and said.pop().startswith("object@")


def test_functions_that_call_each_other_have_a_digest() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert import_object(ship(even, "f"), "f")(6) is True


class OnGpu:
    """Stands for a tensor in GPU memory, which this machine may not have."""

    def __init__(self) -> None:
        self.is_cuda = True


def held_lock() -> Any:
    lock = threading.Lock()

    def f() -> bool:
        return lock.locked()

    return f


def held_generator() -> Any:
    numbers = (n for n in range(3))
    return lambda: next(numbers)


def held_on_gpu() -> Any:
    class Judge:
        def __init__(self) -> None:
            self.weights = {"head": OnGpu()}

        def __call__(self) -> bool:
            return bool(self.weights)

    return Judge()


def held_data() -> Any:
    table = b"x" * (MAX_BYTES + 1)
    return lambda: len(table)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (held_lock, r"'f' cannot be sent to the run's processes, because f\.lock is a _thread\.lock \(cannot pickle"),
        (held_generator, r"'function' cannot be .*, because function\.numbers is a builtins\.generator"),
        (
            held_on_gpu,
            r"'Judge' cannot be .*, because Judge\.weights\.head is a .*OnGpu \(which is in the memory of this",
        ),
        (
            held_data,
            r"'function' cannot be .*, because function is a builtins\.function \(of 64 MiB as a pickle, more",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.functions\.0\.kind: {said}"):
        ship(make(), "reward.functions.0.kind")
    assert not imports._shipped


def test_a_name_is_an_attribute_and_not_a_global_of_that_name() -> None:
    namespace: dict[str, Any] = {"answer": OnGpu()}
    exec("def f(prompt, response, finish_reason):\n    return prompt.answer == response", namespace)
    assert ship(namespace["f"], "reward.functions").endswith(":f")


def digest_of(held: Any) -> str:
    def f() -> Any:
        return held

    return ship(f, "f")


@pytest.mark.parametrize("make", [torch.tensor, lambda one: re.compile(str(one)).search], ids=["tensor", "method"])
def test_the_digest_has_what_is_in_objects_of_libraries(make: Any) -> None:
    assert digest_of(make([1.0, 2.0])) == digest_of(make([1.0, 2.0])) != digest_of(make([1.0, 3.0]))


def test_objects_go_to_files_of_their_user_and_back(tmp_path: Path) -> None:
    path = ship(a_reward(2.0), "f")
    write_objects([path, "my_rewards:f"], tmp_path)
    [file] = (tmp_path / "objects").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "objects").stat().st_mode & 0o777 == 0o700
    imports._shipped.clear()
    for place, mode in ((file, 0o666), (file.parent, 0o770)):
        place.chmod(mode)
        with pytest.raises(UserError, match="others can write the file or its folder, expected only this user to"):
            read_objects([path], [tmp_path])
        place.chmod(mode & ~0o077)
    read_objects([path], [tmp_path / "absent", tmp_path])
    assert import_object(path, "f")(None, "ab", "stop") == 4.0


def test_a_missing_or_damaged_object_is_refused_with_its_key() -> None:
    with pytest.raises(ValueError, match=r"^loss.kind: got 'object@12:f', expected its file in the folder `objects`"):
        import_object("object@12:f", "loss.kind")
    ship_objects({"object@12:f": b"no pickle"})
    with pytest.raises(ValueError, match=r"^loss.kind: 'object@12:f' cannot be loaded: UnpicklingError"):
        import_object("object@12:f", "loss.kind")
    ship_objects({"object@12:f": imports.pickle.dumps(len)})
    assert import_object("object@12:f", "loss.kind") is len
    assert shipped_objects(["object@12:f", "object@3:g", "my:f"]).keys() == {"object@12:f"}
