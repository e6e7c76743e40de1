"""Trains examples over several seeds, with kills, and with shuffled rewards, and says which rewards rose.

    python -m headrace.tests.drills.agents.trainings examples/own-environment/run.yaml --parallel=4 --minutes=30

An example is trained in three variants. `plain` is the example itself. In `killed`, a random process of the run is
killed every minute, and the run is resumed when it has ended. In `control`, each episode gets the reward of an episode
of another prompt, so the true reward must not rise. The runs stand in folders of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from headrace.actors.rewards.config import RewardFunctionConfig
from headrace.bench.records import conditions, markdown
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.outcome import DONE, FAILED
from headrace.trainers.observe.metrics import read_run
from headrace.trainers.supervision.cleanup import is_alive, kill_process

ERRORS = 3.0
"""Number of standard errors by which a reward must rise."""
EVALUATIONS = 5
"""Number of the last evaluations whose mean is reported."""
GRACE_S = 120.0
"""Seconds that a run has to end after an interrupt."""
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Training:
    """One run of one example."""

    config: Path
    variant: str
    """`plain`, `killed` or `control`."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.config.parent.name}-{self.config.stem}-{self.variant}-{self.seed}"

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Reward functions of the example, as they stand in its configuration."""
        section = yaml.safe_load(self.config.read_text()).get("reward") or {}
        return section.get("functions") or [{"kind": "exact_match"}]

    def overrides(self) -> list[str]:
        """Return the settings in which the run differs from the example."""
        given = [f"run.seed={self.seed}", "run.max_restarts=1000000", "logging.tensorboard=false"]
        if self.variant == "killed":
            given.append("run.checkpoint_every=2")
        if self.variant == "control":
            shuffled = {
                "kind": "headrace.tests.drills.agents.shuffled:Shuffled",
                "options": {"functions": self.functions, "seed": self.seed},
            }
            seen = [{**function, "weight": 0.0} for function in self.functions]
            given.append(f"reward.functions={json.dumps([*seen, shuffled])}")
        return given

    def reward(self, line: Figures, prefix: str = "") -> float | None:
        """Return the true reward in a line of metrics. prefix: `val/` for an evaluation."""
        if self.variant != "control":
            return line.get(f"{prefix}reward" if prefix else "reward/mean")
        total = 0.0
        for function in self.functions:
            value = line.get(f"{prefix}reward/{RewardFunctionConfig.model_validate(function).label}")
            if value is None:
                return None
            total += function.get("weight", 1.0) * value
        return total


@dataclass(slots=True)
class Result:
    """What became of one run."""

    name: str
    variant: str
    seed: int
    steps: int = 0
    kills: int = 0
    launches: int = 1
    seconds: float = 0.0
    first: float = math.nan
    """Mean reward over the first tenth of the steps."""
    last: float = math.nan
    """Mean reward over the last tenth of the steps."""
    error: float = math.nan
    """Standard error of the difference of these two means."""
    evaluations: list[float] = field(default_factory=list)
    """Rewards of the last EVALUATIONS evaluations."""
    problem: str = ""

    @property
    def rose(self) -> bool:
        """True if the reward rose by ERRORS standard errors."""
        return self.last - self.first > ERRORS * self.error

    @property
    def evaluated(self) -> tuple[float, float]:
        """Mean of the last evaluations, and its standard error."""
        return mean_and_error(self.evaluations)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error; NaN where there are too few."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def judged(training: Training, result: Result, folder: Path) -> Result:
    """Return the result with the figures of the run in `folder`."""
    with suppress(FileNotFoundError, ValueError):
        metrics, _ = read_run(folder)
        rewards = [value for line in metrics if (value := training.reward(line)) is not None and math.isfinite(value)]
        tenth = max(2, len(rewards) // 10)
        result.steps = int(metrics[-1]["step"] or 0) if metrics else 0
        if len(rewards) >= 2 * tenth:
            (result.first, early), (result.last, late) = (
                mean_and_error(part) for part in (rewards[:tenth], rewards[-tenth:])
            )
            result.error = math.hypot(early, late)
        tested = [value for line in metrics if (value := training.reward(line, "val/")) is not None]
        result.evaluations = tested[-EVALUATIONS:]
    return result


class Runner:
    """Runs trainings in folders of their own, and ends all that it has started."""

    def __init__(self, out: Path, overrides: Sequence[str], kill_every_s: float, until_s: float) -> None:
        """until_s: time (`time.monotonic()`) at which the runs are interrupted."""
        self._out = out.absolute()
        self._overrides = list(overrides)
        self._kill_every_s = kill_every_s
        self._until_s = until_s
        self.stopped = threading.Event()
        """Set to interrupt all runs."""

    def prepare(self, config: Path, command: str) -> Path:
        """Copy the folder of an example, run `command` in the copy, and return the copy's configuration file."""
        copy = self._out / "examples" / f"{config.parent.name}-{config.stem}"
        shutil.copytree(config.parent, copy, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        if command:
            words = [sys.executable if word == "python" else word for word in shlex.split(command)]
            subprocess.run(words, cwd=copy, env=_environment(), check=True)
        return copy / config.name

    def train(self, training: Training) -> Result:
        """Run one training to its end or to the time limit, and return its result."""
        folder, began = self._out / training.name, time.monotonic()
        result = Result(training.name, training.variant, training.seed)
        shutil.copytree(training.config.parent, folder / "work")
        processes = [self._start(training, folder, resume=False)]
        family: set[psutil.Process] = set()
        try:
            self._watch(training, folder, processes, family, result)
        finally:
            _end(processes[-1], family)
        result.seconds = round(time.monotonic() - began, 1)
        return judged(training, result, folder / "run")

    def _watch(
        self,
        training: Training,
        folder: Path,
        processes: list[subprocess.Popen[bytes]],
        family: set[psutil.Process],
        result: Result,
    ) -> None:
        """Kill and resume a run until it has ended. processes: drivers of the run, the last of which lives. family: all
        processes of the run that were seen."""
        saved = folder / "run" / "checkpoints"  # Without a checkpoint, a run cannot be resumed.
        dice, next_kill = random.Random(training.seed), time.monotonic() + self._kill_every_s
        while not self.stopped.wait(0.5) and time.monotonic() < self._until_s:
            code = processes[-1].poll()
            family |= set(_family(processes[-1].pid))
            if code == 0:
                return
            if code is not None:
                if training.variant != "killed" or code == 2:
                    result.problem = f"it ended with the exit code {code} (see {folder / 'output.txt'})"
                    return
                _wait_until_gone(family)
                result.launches += 1
                processes.append(self._start(training, folder, resume=True))
            elif training.variant == "killed" and time.monotonic() >= next_kill and any(saved.glob("step_??????.json")):
                next_kill = time.monotonic() + self._kill_every_s
                result.kills += _kill_one(processes[-1].pid, folder / "run", dice)
        result.problem = "it was interrupted at the time limit"

    def _start(self, training: Training, folder: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        command = [
            "env", "--default-signal=INT", sys.executable, "-m", "headrace.cli", "train", training.config.name,
            f"run.dir={folder / 'run'}", *self._overrides, *training.overrides(), *(["--resume"] if resume else []),
        ]  # fmt: skip
        with open(folder / "output.txt", "ab") as output:
            return subprocess.Popen(
                command, cwd=folder / "work", env=_environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def _environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[4]), ".", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _end(process: subprocess.Popen[bytes], family: set[psutil.Process]) -> None:
    """Interrupt a run, and kill what is left of it after GRACE_S."""
    family |= set(_family(process.pid))
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for one in family:
        kill_process(one)
    process.wait()


def _wait_until_gone(family: set[psutil.Process]) -> None:
    """Wait until a run's watchdog has ended its processes, and kill those that are left after GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for one in family:
        kill_process(one)


def _kill_one(pid: int, run: Path, dice: random.Random) -> bool:
    """Kill the driver, one of the actors of `run`, or a process that they have started, at random. Ray's own processes
    do no work of the run. Returns whether one was killed."""
    listed = {line["pid"] for line in json.loads((run / "actors.json").read_text())["actors"]}
    family = [one for one in _family(pid) if one.pid == pid or one.pid in listed or one.ppid() in listed]
    if not family:
        return False
    with suppress(psutil.NoSuchProcess):
        dice.choice(family).send_signal(signal.SIGKILL)
    return True


def table_of(results: Sequence[Result]) -> list[str]:
    """Return the lines of a Markdown table of the results."""
    header = [
        "run", "steps", "kills", "launches", "first tenth", "last tenth", "standard error", "last evaluations",
        "rose", "problem",
    ]  # fmt: skip
    rows = []
    for one in results:
        mean, error = one.evaluated
        tested = "-" if math.isnan(mean) else f"{mean:.3f} ± {error:.3f}"
        figures = (f"{value:.3f}" for value in (one.first, one.last, one.error))
        counts = (str(value) for value in (one.steps, one.kills, one.launches))
        rows.append([one.name, *counts, *figures, tested, "yes" if one.rose else "no", one.problem or "-"])
    return markdown(header, rows)


def write_results(results: Sequence[Result], out: Path, facts: dict[str, Any]) -> None:
    """Write results.json and results.md into `out`. facts: conditions of the runs."""
    found = [{**asdict(one), "rose": one.rose, "evaluated": one.evaluated} for one in results]
    (out / "results.json").write_text(json.dumps({"conditions": facts, "runs": found}, indent=1))
    (out / "results.md").write_text("\n".join([*table_of(results), ""]))


def complaints(results: Sequence[Result]) -> list[str]:
    """Return one sentence for each run whose reward should have risen and did not, or the other way round."""
    return [
        f"{one.name}: the reward {'rose' if one.rose else 'did not rise'} by {ERRORS:g} standard errors"
        for one in results
        if one.rose == (one.variant == "control")
    ]


def run_trainings(
    runner: Runner, trainings: Sequence[Training], parallel: int, out: Path, tell: Callable[[str], None]
) -> list[Result]:
    """Run the trainings, `parallel` at a time, and return their results. The files are written after each of them."""
    results: list[Result] = []
    facts = conditions()
    pool = ThreadPoolExecutor(parallel)
    try:
        for done in [pool.submit(runner.train, training) for training in trainings]:
            results.append(done.result())
            tell(f"{results[-1].name}: {results[-1].first:.3f} -> {results[-1].last:.3f} {results[-1].problem}")
            write_results(results, out, facts)
    finally:  # After Ctrl-C, too: the runs are interrupted, and those that have not begun end at once.
        runner.stopped.set()
        pool.shutdown(cancel_futures=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainings, print the table, and return the exit code: 1 if a reward did not do what it should."""
    parser = Parser("trainings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="configuration of an example")
    for variant, seeds in (("plain", "0,1,2"), ("killed", "0"), ("control", "0")):
        parser.add_argument(f"--{variant}", default=seeds, metavar="SEEDS", help=f"seeds of the variant {variant}")
    parser.add_argument("--prepare", default="", metavar="COMMAND", help="command to run in the example's folder first")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="number of runs at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="time limit of all runs together")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="S", help="seconds between two kills")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs and the results")
    arguments = parser.parse_args(argv)
    return ended(lambda: _trainings(arguments))


def _trainings(arguments: argparse.Namespace) -> int:
    out = results_folder(arguments, "trainings", new=True)
    out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * arguments.minutes
    runner = Runner(out, arguments.set, arguments.kill_every, until_s)
    trainings = [
        Training(copy, variant, int(seed))
        for copy in [runner.prepare(config.absolute(), arguments.prepare) for config in arguments.configs]
        for variant in ("plain", "killed", "control")
        for seed in filter(None, getattr(arguments, variant).split(","))
    ]
    results = run_trainings(runner, trainings, arguments.parallel, out, lambda line: print(line, flush=True))
    print("\n".join([*table_of(results), *complaints(results)]))
    return FAILED if complaints(results) else DONE


if __name__ == "__main__":
    sys.exit(main())
