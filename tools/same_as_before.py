"""Records reference runs of one checkout, and compares the runs of a later checkout with them to the last digit.

    python tools/same_as_before.py record FOLDER [--checkout PATH]
    python tools/same_as_before.py compare FOLDER [--checkout PATH] [--only NAME ...]

`record` adds one recording to FOLDER: the folders of all runs. Record at least twice, since a metric is reproducible
only if all recordings have the same value. `compare` makes the runs again and compares the reproducible metrics of each
step, and the bytes of the trained models. Then it resumes copies of recorded run folders, from a checkpoint halfway or
from a journal, and compares the steps that follow with those of the runs that were never stopped. It prints each
difference and the metrics that it leaves out, and exits with 1 if there is a difference. PATH is the checkout whose
code runs; unset, the one that has this file. Either command takes 8 to 15 minutes on two cores. FOLDER must not move.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

RUN_TIMEOUT_S = 1800
TIMES = ("_s", "_ms", "_us", "seconds", "tflops", "_gib", "idle/rollout", "idle/train")
"""Ends of the names of metrics that are times, rates per second, shares of time, or memory of a process."""
DECIDED_BY_TIMING = (
    "dataplane/calls",
    "dataplane/claim/calls",
    "dataplane/status/calls",
    "dataplane/put/calls",
    "dataplane/bytes_put",
    "dataplane/put/bytes",
    "driver/bytes_per_row",
)
"""Counts of the data plane's calls and their bytes. Groups that end together are put together, and a claim that has
waited for a second is made again."""
ROUNDED = 1e-12
"""Largest relative difference between values that count as rounded.

The recordings have some means only so far, since they are added up in the order in which groups end.
"""


@dataclass(frozen=True)
class Reference:
    """One reference run: `headrace train`, or the example that trains two runs on one pool."""

    example: str
    """Path of the config or script, relative to `examples/`."""
    steps: int
    """Number of steps. A checkpoint and a validation come halfway and at the end."""
    overrides: tuple[str, ...] = ()
    """Further overrides of the config."""
    folders: tuple[str, ...] = ("",)
    """Run folders, relative to the folder of the reference run."""


MEGATRON = ("trainer.backend=megatron", "trainer.tp=2", "trainer.packing=packed")
REFERENCES = {
    "sync": Reference("quickstart.yaml", 20),
    "async": Reference("quickstart-async.yaml", 20),
    "streaming": Reference("quickstart-streaming.yaml", 20),
    "megatron": Reference("quickstart.yaml", 6, MEGATRON),
    "pool": Reference("time-sharing/both.py", 4, folders=("a", "b")),
}
MAKES_MODEL = "sync"
"""Reference run that makes the base model. The others start from the one of the first recording."""
KILLED = "killed"
"""Name of a run like `async` that is killed two steps behind its checkpoint and leaves a journal."""
RESUMED = {"sync": "sync", "megatron": "megatron", KILLED: "async"}
"""Recorded run that is resumed -> reference run whose steps it must repeat."""


def main() -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folder", type=lambda text: Path(text).resolve(), help="folder of the recordings")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent, help="checkout whose code runs")
    parser.add_argument("--only", nargs="+", choices=[*REFERENCES, KILLED], default=[*REFERENCES, KILLED])
    given = parser.parse_args()
    recordings = sorted(given.folder.glob("recording-*"))
    if given.command == "compare" and len(recordings) < 2:
        parser.error(f"{given.folder} has {len(recordings)} recordings; `compare` needs two or more")
    with tempfile.TemporaryDirectory() as packages:
        (Path(packages) / "headrace").symlink_to(given.checkout.resolve())
        if given.command == "record":
            return _record(Path(packages), recordings, given.folder / f"recording-{len(recordings) + 1}")
        return _compare(Path(packages), recordings, given.folder / time.strftime("compared-%m%d-%H%M%S"), given.only)


def _record(packages: Path, recordings: Sequence[Path], new: Path) -> int:
    """Make every run, and every resume of one; returns the exit code."""
    runs = Runs(packages, [*recordings, new][0] / MAKES_MODEL / "base_model")
    for name in REFERENCES:
        runs.make(name, new / name).check_returncode()
    runs.kill(new / KILLED)
    for name in RESUMED:
        runs.resume(name, new / name, new / f"resumed-{name}").check_returncode()
    return 0


def _compare(packages: Path, recordings: Sequence[Path], new: Path, names: Sequence[str]) -> int:
    """Make new runs in the folder `new`, resume those of the first recording, and compare both with all recordings.

    Returns the exit code.
    """
    runs, found = Runs(packages, recordings[0] / MAKES_MODEL / "base_model"), 0
    for name in [name for name in REFERENCES if name in names]:
        done = runs.make(name, new / name)
        known = {one: [each / name / one for each in recordings] for one in REFERENCES[name].folders}
        for one, folders in known.items():
            found += _differences(f"{name} {one}".strip(), folders, new / name / one, done, alike=[*known.values()])
    for name, whole in RESUMED.items():
        if name in names:
            done = runs.resume(name, recordings[0] / name, new / f"resumed-{name}")
            known = [one for each in recordings for one in (each / whole, each / f"resumed-{name}")]
            half = REFERENCES[whole].steps // 2
            found += _differences(f"resumed {name}", known, new / f"resumed-{name}", done, half)
    print(f"{found} differences")
    return int(found > 0)


@dataclass(frozen=True)
class Runs:
    """Runs of the code of one checkout."""

    packages: Path
    """Folder whose `headrace` is a link to the checkout."""
    base_model: Path
    """Model from which all runs start but the one that makes it."""

    def make(self, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Make a reference run."""
        return self._run(self._command(name, folder), folder)

    def resume(self, name: str, recorded: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Resume a copy of a recorded run with its recorded config.

        If that is answered with one line, print the line and resume with the config of this checkout.
        """
        shutil.copytree(recorded, folder)
        shutil.rmtree(folder / "model", ignore_errors=True)
        for last in (folder / "checkpoints").glob(f"step_{REFERENCES[RESUMED[name]].steps:06}*"):
            shutil.rmtree(last) if last.is_dir() else last.unlink()
        done = self._run([*HEADRACE, "train", f"{folder}/config.yaml", "--resume", f"run.dir={folder}"], folder)
        if done.returncode == 0 or len(done.stdout.strip().splitlines()) > 1:
            return done
        print(f"resumed {name}: the recorded config is answered with: {done.stdout.strip()}")
        return self._run([*self._command(RESUMED[name], folder), "--resume"], folder)

    def kill(self, folder: Path) -> None:
        """Make the run that is killed. Its watchdog ends its other processes."""
        log = folder.with_suffix(".txt").open("w")
        process = subprocess.Popen(self._command(RESUMED[KILLED], folder), stdout=log, stderr=log, env=self._env)
        while max((step for _, step in _lines(folder)), default=0) < REFERENCES[RESUMED[KILLED]].steps // 2 + 2:
            assert process.poll() is None, f"{folder} ended before it was killed"
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(family, timeout=120)[1], f"{folder} left processes"

    def _command(self, name: str, folder: Path) -> list[str]:
        asked = REFERENCES[name]
        half, example = asked.steps // 2, f"{self.packages}/headrace/examples/{asked.example}"
        counts = [f"algorithm.steps={asked.steps}", f"validation.every={half}", f"run.checkpoint_every={half}"]
        model = [] if name == MAKES_MODEL else [f"model.path={self.base_model}", "warmup.corpus=none"]
        overrides = ["run.deterministic=true", *asked.overrides, *counts, *model]
        if example.endswith(".py"):
            return [sys.executable, example, str(folder), *overrides]
        return [*HEADRACE, "train", example, f"run.dir={folder}", *overrides]

    def _run(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        print(time.strftime("%H:%M:%S"), folder, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env, timeout=RUN_TIMEOUT_S
        )

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.packages), "COLUMNS": "200"}


HEADRACE = (sys.executable, "-m", "headrace.cli")


def _lines(folder: Path, since: int = -1) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the metrics of a run by event ("" for steps) and step, digit by digit, and the hash of the trained model.

    With `since`, they are only those of the steps after it and after a resume.
    """
    path = folder / "metrics.jsonl"
    found: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    for text in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if text.endswith("\n"):  # the last line may be being written
            line = json.loads(text, parse_float=str)
            event = line.get("event", "")
            if event == "resumed":
                found.clear()
            if since < 0 or (event == "" and line["step"] > since):
                found[event, line["step"]].update(line)
    for model in sorted(folder.glob("model/*.safetensors")):
        found["model", 0][model.name] = hashlib.sha256(model.read_bytes()).hexdigest()
    return found


def _differences(
    name: str,
    known: Sequence[Path],
    new: Path,
    done: subprocess.CompletedProcess[str],
    since: int = -1,
    alike: Sequence[Sequence[Path]] = (),
) -> int:
    """Print how a run differs from those known, and what is left out; returns the number of differences.

    `alike` has the recordings of runs of the same kind, such as the other tenant: what varies there can vary here.
    """
    if done.returncode:
        print(f"{name}: FAILED\n{done.stdout}")
        return 1
    before, after = [_lines(folder, since) for folder in known], _lines(new, since)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    rounded, unlike = _spread([before, *([_lines(folder, since) for folder in group] for group in alike)])
    for at in sorted({*after, *(at for lines in before for at in lines)}):
        for metric in sorted({*after[at], *(metric for lines in before for metric in lines[at])}):
            values, value = [lines[at].get(metric, "absent") for lines in before], after[at].get(metric, "absent")
            verdict = _verdict(metric, values, value, metric in rounded, metric in unlike)
            found[verdict][metric] += 1
            if verdict == "differ":
                print(f"{name}, {at[0] or 'step'} {at[1]}: {metric} is {value}, before {' or '.join(map(str, values))}")
    for verdict, metrics in found.items():
        print(f"{name}: {metrics.total()} values of {len(metrics)} metrics {verdict}")
        if verdict not in ("are equal", "differ"):
            print("    " + ", ".join(f"{metric} ({count})" for metric, count in metrics.items()))
    return found["differ"].total()


def _spread(groups: Sequence[Sequence[dict[tuple[str, int], dict[str, Any]]]]) -> tuple[set[str], set[str]]:
    """Return the metrics that recordings have only but for rounding at some step, and those that differ by more."""
    rounded, unlike = set[str](), set[str]()
    for recordings in groups:
        for at in {at for lines in recordings for at in lines}:
            for metric in {metric for lines in recordings for metric in lines[at]}:
                values = [lines[at].get(metric, "absent") for lines in recordings]
                if any(value != values[0] for value in values):
                    (rounded if _close(values) else unlike).add(metric)
    return rounded, unlike


def _verdict(metric: str, before: Sequence[Any], now: Any, rounded: bool, unlike: bool) -> str:
    """Return what a value is, given those of the recordings, and whether the metric varies among recordings."""
    if (now == "absent") != ("absent" in before) and len({value == "absent" for value in before}) == 1:
        return "differ"
    if metric.endswith(TIMES):
        return "left out as times, rates or memory"
    if metric in DECIDED_BY_TIMING:
        return "left out as decided by timing"
    if unlike:
        return "left out as they differ between recordings"
    if rounded:
        return "are equal but for rounding, as in the recordings" if _close([*before, now]) else "differ"
    return "are equal" if now == before[0] else "differ"


def _close(values: Sequence[Any]) -> bool:
    """Return whether all values are equal, but for rounding if they are numbers."""
    if all(value == values[0] for value in values):
        return True
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        return False
    return max(numbers) - min(numbers) <= ROUNDED * max(map(abs, numbers))


if __name__ == "__main__":
    sys.exit(main())
