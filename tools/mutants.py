"""Breaks the code in known ways, one at a time, and reports which of them the tests notice (mutation testing).

    python tools/mutants.py [words that the names of mutants must contain]
    python tools/mutants.py --random 20 --seed 1

A mutant replaces one piece of text in a copy of the checkout, where the tests that should notice the change then run.
It is killed when one of them fails, else it survives. Prints a line for each mutant and a total. Exits with 1 when one
survives, and with 2 when a mutant's text is not in its file exactly once or tests fail without any mutant.

With `--random`, the mutants are drawn from the whole package (see `random_mutants.py`). Their tests are those of the
mirrored folder and those that import the changed module or a module that imports it. Tests that start no process run
first. A test that fails counts if it passes without the mutant. Exits with 1 when more than MAX_SURVIVORS survive.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import random_mutants

ROOT = Path(__file__).parent.parent
MAX_SURVIVORS = 2
"""Mutants of a random draw that may survive; some are no mistakes, such as a longer sleep."""
TEST_TIMEOUT_S = 60
"""Seconds after which a test that hangs because of a mutant counts as failed."""
RUN_TIMEOUT_S = 900
"""Seconds after which all tests of a mutant together count as failed, with the exit code TIMED_OUT."""
TIMED_OUT = 124
LEFT_OUT = (".*", "build", "__pycache__", "*.egg-info")
"""Name patterns of files and folders in the checkout that are not copied."""
MARKS = "not slow and not drill and not gpu and not vllm and not megatron"


@dataclass(frozen=True)
class Mutant:
    """One way to break the code: a replacement of text in one file."""

    name: str
    """Description of what the mutant breaks, for the report."""
    path: str
    """Path of the file, relative to the checkout."""
    old: str
    """Text that is in the file exactly once."""
    new: str
    """Text that replaces `old`."""
    tests: str
    """Files and folders of the tests that should notice the change, separated by spaces."""
    select: str = ""
    """Expression that selects some of these tests, for pytest's `-k`; "" selects all."""


SHM, SHM_TESTS = "dataplane/stores/shared_memory.py", "tests/dataplane/stores/test_shared_memory.py"
RPC_TESTS = "tests/dataplane/rpc"
IN_PROCESS = "not processes and not actor and not ray and not mooncake and not simple"

MUTANTS = (
    # Eight from a review of the data plane.
    Mutant(
        "shm: a read that ends checks no generation",
        SHM,
        """        started = time.monotonic()
        for want in wants:
            self._check("get", want""",
        """        started = time.monotonic()
        for want in wants[:0]:
            self._check("get", want""",
        f"{SHM_TESTS} tests/dataplane/contract/test_receipts.py",
        "shm or shared_memory",
    ),
    Mutant(
        "shm: the range of a block is given away under a living writer",
        SHM,
        "            return pid != 0 and process_start(pid) == int(self._slots[slot, WRITER_START])",
        "            return False",
        SHM_TESTS,
    ),
    Mutant(
        "shm: a freed block keeps its generation",
        SHM,
        "            self._slots[held[0], GENERATION] = 0\n",
        "",
        SHM_TESTS,
    ),
    Mutant(
        "rpc: any proof of the key will do",
        "dataplane/security/authenticated_listener.py",
        "        self._handshake.check(message)\n",
        "",
        f"{RPC_TESTS} tests/dataplane/security",
    ),
    Mutant(
        "rpc: the claims of a client that has died go on waiting",
        "dataplane/rpc/server.py",
        "        for task in self.tasks.values():\n            task.cancel()",
        "        pass",
        RPC_TESTS,
    ),
    Mutant(
        "rpc: a connection on which a call failed goes back to the pool",
        "dataplane/rpc/socket_link.py",
        "        except OSError:\n            connection.close()\n            return unknown_outcome(op)\n",
        "        except OSError:\n            self._give(connection)\n            return unknown_outcome(op)\n",
        RPC_TESTS,
    ),
    Mutant(
        "local: a block that was freed is written all the same",
        "dataplane/stores/local.py",
        "            if block_id in self._refused:",
        "            if False:",
        "tests/dataplane/client",
        IN_PROCESS,
    ),
    Mutant(
        "a group takes one row too many",
        "dataplane/directory/rows.py",
        "        over = ((filled > self.group_size) & (added > 0)).nonzero()[0]",
        "        over = ((filled > self.group_size + 1) & (added > 0)).nonzero()[0]",
        "tests/dataplane/directory",
    ),
    # Twelve chosen from the code, in places where a mistake loses rows, repeats them or changes their bytes.
    Mutant(
        "leases: renewals that fail end them",
        "dataplane/client/lease_renewal.py",
        "                    told = True",
        "                    self._lose(asked)",
        "tests/dataplane/client/test_grants.py",
    ),
    Mutant(
        "leases: one that runs out returns its finished rows too",
        "dataplane/directory/directory.py",
        "        return lease.rows[column[lease.rows] == lease.lease_id]",
        "        return lease.rows",
        "tests/dataplane/directory",
    ),
    Mutant(
        "shm: a writer does not look again once it has marked its slot",
        SHM,
        "            # If the block was freed before the mark was seen, the range may belong to another block by now.\n"
        '            self._check("put", block_id, slot, started)\n',
        "",
        SHM_TESTS,
    ),
    Mutant(
        "receipts of another data plane are read",
        "dataplane/client/operations.py",
        "        if meta.plane_id != self._plane_id:",
        "        if False:",
        "tests/dataplane/client/test_reads.py",
        IN_PROCESS,
    ),
    Mutant(
        "watchdog: no margin beyond a stage's bound",
        "trainers/supervision/watchdog.py",
        "        return self.stood_s(beat) > beat.bound_s + self._margin_s",
        "        return self.stood_s(beat) > beat.bound_s",
        "tests/trainers/supervision",
    ),
    Mutant(
        "feed: a step takes rows that it holds already",
        "trainers/grpo/feed.py",
        "            self._refuse_held(meta)\n",
        "",
        "tests/trainers/grpo/test_feed.py",
    ),
    Mutant(
        "feed: rows may be one version older than max_staleness allows",
        "trainers/config/staleness.py",
        "        return version - self.window\n",
        "        return version - self.window - 1\n",
        "tests/trainers/grpo/test_feed.py",
    ),
    Mutant(
        "journal: groups of outstanding prompts are trimmed",
        "actors/rollout/journal.py",
        "            self._segments.trim(lambda position: position < first and position not in kept)",
        "            self._segments.trim(lambda position: position < first)",
        "tests/actors/rollout/test_journal.py",
    ),
    Mutant(
        "recovery: a recorded turn answers twice",
        "actors/environments/recovery.py",
        "        record = found.pop(index)",
        "        record = found[index]",
        "tests/actors/rollout/test_turn_journal.py",
    ),
    Mutant(
        "credit: space that has expired is used",
        "dataplane/client/put_credit.py",
        "item[0].num_blocks >= num_blocks and item[1] > now",
        "item[0].num_blocks >= num_blocks",
        "tests/dataplane/client/test_grants.py",
        IN_PROCESS,
    ),
    Mutant(
        "checkpoints: one that could not be written counts as whole",
        "trainers/grpo/checkpoints.py",
        "                self._give_up(state, error)\n                return\n            self._whole = state\n",
        "                self._give_up(state, error)\n            self._whole = state\n",
        "tests/trainers/grpo/test_checkpoints.py",
    ),
    Mutant(
        "weights: an engine goes back to an older version",
        "trainers/grpo/weight_sync.py",
        "[engine for engine in asked if engine.version < version or engine.broken]",
        "[engine for engine in asked if engine.version != version or engine.broken]",
        "tests/trainers/grpo/test_weight_sync.py",
    ),
    Mutant(
        "stores: a process that was slow once is not asked to free again",
        "dataplane/stores/counting_host.py",
        "for peer, blocks in enumerate(self._blocks) if blocks]",
        "for peer, blocks in enumerate(self._blocks) if blocks and peer not in self._silent]",
        "tests/dataplane/stores/test_actors.py",
    ),
    # Two that the tests of an earlier version did not notice.
    Mutant(
        "rpc: requests of a client that has gone are carried out",
        "dataplane/rpc/server.py",
        "            if has_gone and op not in TAKE_BACK:",
        "            if False:",
        RPC_TESTS,
    ),
    Mutant(
        "rpc: a pooled connection that has ended is used",
        "dataplane/rpc/socket_link.py",
        "            if not _is_readable(connection):\n                return connection",
        "            if True:\n                return connection",
        RPC_TESTS,
    ),
)


def main(argv: Sequence[str]) -> int:
    """Try the mutants that the arguments choose; returns the exit code."""
    parser = argparse.ArgumentParser(description="Break the code in known ways, and report what the tests notice.")
    parser.add_argument("words", nargs="*", help="words that the names of mutants must contain")
    parser.add_argument("--random", type=int, metavar="N", help="try N mutants that are drawn from the whole package")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as folder:
        checkout = Path(folder) / "headrace"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if options.random:
            return try_random(checkout, options.random, options.seed)
        return try_named(checkout, [one for one in MUTANTS if all(word in one.name for word in options.words)])


def try_named(checkout: Path, chosen: Sequence[Mutant]) -> int:
    """Try mutants of the table; returns the exit code."""
    for mutant in chosen:
        count = (checkout / mutant.path).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            print(f"{mutant.name}: its text is in {mutant.path} {count} times, expected once")
            return 2
    for tests, select in sorted({(mutant.tests, mutant.select) for mutant in chosen}):
        code, found = run_tests(checkout, tests, select)
        if code == 1:  # a busy machine can fail a test of times, but not twice
            code, found = run_tests(checkout, tests, select)
        if code:
            print(f"without a mutant, the tests {tests} fail (exit code {code}): {found}")
            return 2
    survivors = 0
    for mutant in chosen:
        started = time.monotonic()
        code, found = try_mutant(checkout, mutant)
        survivors += code != 1
        verdict = "killed  " if code == 1 else "SURVIVED" if code == 0 else f"exit {code}"
        print(f"{verdict} | {mutant.name} | {found} | {time.monotonic() - started:.0f} s", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return int(survivors > 0)


def try_random(checkout: Path, number: int, seed: int) -> int:
    """Try `number` mutants drawn by `seed`; returns 0 if all but MAX_SURVIVORS are killed, else 1."""
    survivors = 0
    for change in random_mutants.draw(checkout, number, seed):
        started = time.monotonic()
        killer = killer_of(checkout, change)
        survivors += not killer
        verdict = f"killed   | {killer}" if killer else "SURVIVED |"
        print(
            f"{verdict} | {change.path}:{change.line} | {change.what} | {time.monotonic() - started:.0f} s", flush=True
        )
    print(f"{number - survivors} of {number} mutants killed (seed {seed})")
    return int(survivors > MAX_SURVIVORS)


def killer_of(checkout: Path, change: random_mutants.Change) -> str:
    """Return a test that fails with `change` and passes without it; "" if there is none."""
    path = checkout / change.path
    text = path.read_bytes()
    for marks in (f"{MARKS} and not processes and not long", f"{MARKS} and (processes or long)"):
        path.write_bytes(change.apply(text))
        try:
            code, found = run_tests(checkout, " ".join(tests_of(checkout, change.path)), "", marks)
        finally:
            path.write_bytes(text)
        if code in (0, 5):
            continue
        if code == TIMED_OUT:
            return "the tests took too long"
        if run_tests(checkout, found.partition("[")[0].split()[0], "", MARKS)[0] == 0:
            return found
    return ""


def tests_of(checkout: Path, path: str) -> list[str]:
    """Return the test files and folders that should notice a change of the module at `path`."""
    module = "headrace." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    users = {module}
    for file in (path for top in random_mutants.FOLDERS for path in (checkout / top).rglob("*.py")):
        if _imports(file, checkout, {module}):
            users.add("headrace." + file.relative_to(checkout).as_posix().removesuffix(".py").replace("/", "."))
    files = [file for file in sorted((checkout / "tests").rglob("test_*.py")) if _imports(file, checkout, users)]
    folder = Path("tests", path).parent
    while not (checkout / folder).is_dir():
        folder = folder.parent
    outside = [file.relative_to(checkout) for file in files if (checkout / folder) not in file.parents]
    skipped = ("runs", "drills", "bench", "attacks")  # whole runs, which take minutes
    return [str(folder), *(str(file) for file in outside if file.parts[1] not in skipped)]


def _imports(file: Path, checkout: Path, modules: set[str]) -> bool:
    """Return whether a file imports one of `modules`, relatively or by its full name."""
    here = ["headrace", *file.relative_to(checkout).parts[:-1]]
    for dots, name, names in re.findall(
        r"^\s*from (\.*)([\w.]*) import \(?([^)]*?)(?:\)|$)", file.read_text(), re.MULTILINE
    ):
        base = ".".join([*(here[: len(here) - len(dots) + 1] if dots else []), *([name] if name else [])])
        if base in modules or any(f"{base}.{one}" in modules for one in re.findall(r"\w+", names)):
            return True
    return False


def try_mutant(checkout: Path, mutant: Mutant) -> tuple[int, str]:
    """Run the mutant's tests on the changed code, and change it back. Returns what `run_tests` returns."""
    path = checkout / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run_tests(checkout, mutant.tests, mutant.select)
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(checkout: Path, tests: str, select: str, marks: str = MARKS) -> tuple[int, str]:
    """Run tests until one fails. Returns (pytest's exit code, the test that failed or else pytest's last line)."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    command += ["-m", marks, "-k", select, f"--timeout={TEST_TIMEOUT_S}", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(checkout.parent)}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"more than {RUN_TIMEOUT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr]
    found = [
        re.sub(r"^(FAILED|ERROR) ", "", line).partition(" - ")[0] for line in lines if re.match("FAILED|ERROR", line)
    ]
    return done.returncode, (found or lines)[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
