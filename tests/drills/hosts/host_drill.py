"""Kills and cuts off hosts of real runs over four hosts, and checks that every row is trained once: `make drill-hosts`.

A host of a run is lost again and again, and comes back. The report says how the run reacted each time, and what became
of its rows.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.bench.hosts import namespaces
from headrace.bench.records import conditions, markdown, write_page, write_records, write_summary
from headrace.cli.arguments import Parser, chosen, known, results_folder
from headrace.cli.command import ended
from headrace.cli.outcome import DONE, FAILED
from headrace.tests.drills.chaos.injured_run import GROUP_SIZE, PROMPTS_PER_STEP
from headrace.tests.drills.chaos.ledger import Balance, balance
from headrace.tests.drills.hosts.injured_cluster import InjuredCluster
from headrace.trainers.errors import UserError

How = Literal["killed", "cut off", "cut for 60 s"]
Outcome = Literal["goes on", "restarts", "stops", "hangs"]
WORSE: tuple[Outcome, ...] = ("goes on", "restarts", "stops", "hangs")
"""Outcomes, from the best to the worst."""
STEPS_AFTER = 3
"""Number of steps that a run must finish after an event."""
CHECKPOINT_EVERY = 3
"""Number of steps from one checkpoint to the next."""
HEALED_S = 300.0
"""Seconds within which a run must have finished them."""
DECLARED_DEAD_S = 45.0
"""Seconds after which Ray has declared a node dead that is cut off."""
CUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A kind of host to lose, in a run of its own."""

    times: int
    """Number of times that a host is lost if `--times` is not given."""
    worst: Outcome
    """Worst outcome that the page what-a-run-survives.md allows."""
    cpus: tuple[int, ...]
    """Logical CPUs of each host. The first has Ray's head and no actor."""
    lost: str
    """Beginning of the name of a process that the lost host must have."""
    kept: tuple[str, ...]
    """Beginnings of names of processes that it must not have."""
    hows: tuple[How, ...] = ("killed", "cut off")
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Sections of the configuration that differ from the chaos drill's."""


_EMBEDDED = {"rollout": {"num_actors": None}, "trainer": {"dp": 1}}
SCENES: dict[str, Scene] = {
    "rollouts": Scene(5, "goes on", (0, 1, 1, 2), "rollout", ("train worker", "directory"), sections=_EMBEDDED),
    "engines": Scene(
        5, "goes on", (0, 2, 2, 2), "engine", ("train worker", "directory"), sections={"trainer": {"dp": 1}}
    ),
    "ranks": Scene(
        5, "restarts", (0, 1, 2, 2), "train worker", ("directory",), sections={"rollout": {"num_actors": None}}
    ),
    "directory": Scene(5, "stops", (0, 2, 2, 2), "directory", (), sections=_EMBEDDED),
    "link": Scene(2, "stops", (0, 1, 1, 2), "rollout", ("train worker", "directory"), ("cut for 60 s",), _EMBEDDED),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One loss of a host, and what the run did."""

    scene: str
    host: str
    how: How
    had: tuple[str, ...]
    """Names of the run's processes on the host."""
    step: int
    """Last step that was finished before."""
    outcome: Outcome
    seconds: float
    """Seconds from the loss until the run had finished STEPS_AFTER more steps."""
    sentences: tuple[str, ...]
    """Sentences that the run printed about it."""


@dataclass(slots=True)
class Result:
    """Events of one scene, and the rows of its run."""

    scene: str
    events: list[Event]
    balance: Balance | None
    complaints: list[str]


def choose(places: Mapping[str, Sequence[str]], scene: Scene, heads: Sequence[str], dice: random.Random) -> str | None:
    """Return the name of the host to lose; None if no host has the processes that the scene asks for. places: names of
    the processes of each host. heads: hosts that must stay."""
    fit = [
        host
        for host, names in sorted(places.items())
        if host not in heads
        and any(name.startswith(scene.lost) for name in names)
        and not any(name.startswith(scene.kept) for name in names)
    ]
    return dice.choice(fit) if fit else None


def outcome_of(said: str, *, code: int | None, went_on: bool) -> Outcome:
    """Return what a run did, from what it printed since the loss. code: exit code; None if it runs."""
    if code is not None:
        return "stops"
    if not went_on:
        return "hangs"
    return "restarts" if "restart " in said else "goes on"


def judged(event: Event, worst: Outcome, code: int | None) -> list[str]:
    """Return a sentence for each promise that a run broke in an event."""
    where = f"{event.scene}: {event.host} {event.how} at step {event.step}"
    broken = []
    if WORSE.index(event.outcome) > WORSE.index(worst):
        broken.append(f"{where}: the run {event.outcome}, expected that it {worst} at worst")
    if code == 2:
        broken.append(f"{where}: exit code 2, expected 1, because it is no mistake of the user")
    if code is not None and not event.sentences:
        broken.append(f"{where}: it stopped without a sentence")
    return broken


class Stage:
    """Plays one scene: starts its run, loses hosts, and checks the rows at the end."""

    def __init__(self, name: str, folder: Path, members: Sequence[namespaces.Host], seed: int) -> None:
        self._name, self._scene, self._dice = name, SCENES[name], random.Random(f"{seed} {name}")
        self._seed = seed
        driver = 1  # Not the host of Ray's head, without which Ray ends everything.
        self._run = InjuredCluster(folder, members, self._scene.cpus, driver)
        self.result = Result(name, [], None, [])

    def play(self, times: int, tell: Callable[[str], None]) -> None:
        """Lose a host `times` times, then interrupt the run, resume it, and compare its rows."""
        run, told = self._run, self.result.complaints
        run.configure(self._seed, run={"checkpoint_every": CHECKPOINT_EVERY}, **self._scene.sections)
        run.start(resume=False)
        if not run.wait_for_steps(2 * CHECKPOINT_EVERY, HEALED_S):  # Then there is a checkpoint to go back to.
            told.append(f"{self._name}: the run did not start: {run.explanation() or run.output[-500:]}")
            return
        for number in range(1, times + 1):
            kept = [run.members[0].name] + [run.members[run.driver].name] * (self._name != "directory")
            host = choose(run.places(), self._scene, kept, self._dice)
            if host is None:
                told.append(f"{self._name}: no host has only what the scene asks for: {run.places()}")
                break
            event, code = self._lose(host, self._scene.hows[number % len(self._scene.hows)])
            self.result.events.append(event)
            told += judged(event, self._scene.worst, code)
            tell(f"{self._name} {number}/{times}: {host} ({', '.join(event.had)}) {event.how} at step {event.step}: "
                 f"{event.outcome} after {event.seconds:.0f} s: {event.sentences[-1:] or ''}")  # fmt: skip
            if event.outcome == "hangs" or run.returncode is not None:
                break
        if run.returncode is None:
            run.interrupt()
        run.start(f"algorithm.steps={run.step() + STEPS_AFTER}", resume=True)
        if code := run.wait(HEALED_S):
            told.append(f"{self._name}: the last --resume ended with {code}: {run.explanation()}")
        self.result.balance = balance(
            run.notes(), prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE, may_lose_rows=True
        )
        told += [f"{self._name}: {line}" for line in self.result.balance.complaints]

    def _lose(self, name: str, how: How) -> tuple[Event, int | None]:
        """Lose a host, bring it back, and wait for new steps. Returns the event, and the exit code if the run ended."""
        run = self._run
        number = [host.name for host in run.members].index(name)
        host, had, step = run.members[number], tuple(run.places()[name]), run.step()
        began_s, before = time.monotonic(), len(run.output)
        if how == "killed":
            host.kill()
            time.sleep(self._dice.uniform(5.0, 60.0))
        else:
            host.cut()
            time.sleep(CUT_S if how == "cut for 60 s" else DECLARED_DEAD_S)
            host.heal()
        if how == "cut for 60 s":
            run.wait_for_steps(STEPS_AFTER, 60.0)  # Its raylet does not come back by itself.
        host.restart()
        run.join(number)
        ended = number == run.driver
        if ended:
            run.wait(30.0)  # It ended with its host; a wrapper starts it again on another one.
            run.driver = next(n for n in range(1, len(run.members)) if n != number)
            run.start(resume=True)
        went_on = run.wait_for_steps(STEPS_AFTER, HEALED_S)
        said, code = run.output[before:], run.returncode
        outcome = "stops" if ended else outcome_of(said, code=code, went_on=went_on)
        if outcome == "stops" and code is not None:
            run.start(resume=True)
            went_on = run.wait_for_steps(STEPS_AFTER, HEALED_S)
        lines = [
            line.strip() for line in said.splitlines() if any(word in line for word in ("host", "restart", "died"))
        ]
        return Event(
            self._name, name, how, had, step, outcome if went_on else "hangs", time.monotonic() - began_s, tuple(lines)
        ), code


def run_drill(
    out: Path, only: Sequence[str], times: int | None, seed: int, tell: Callable[[str], None]
) -> tuple[list[Result], dict[str, Any]]:
    """Play the scenes one after another. Writes events.jsonl and summary.json into `out`, and returns the results and
    the conditions."""
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(seed=seed, scenes=list(only))
    results = []
    for name in only:
        with namespaces.hosts(len(SCENES[name].cpus)) as members:
            stage = Stage(name, out.absolute() / name, members, seed)
            results.append(stage.result)
            try:
                stage.play(SCENES[name].times if times is None else times, tell)
            except Exception as error:  # The other scenes go on.
                stage.result.complaints.append(f"{name}: the drill failed: {type(error).__name__}: {error}")
        for line in results[-1].complaints:
            tell(f"failed: {line}")
        events = [asdict(event) for result in results for event in result.events]
        write_records(out / "events.jsonl", events, facts)
        write_summary(out / "summary.json", summarise(results), facts)
    return results, facts


def summarise(results: Sequence[Result]) -> dict[str, float]:
    """Return the drill's figures by name, such as `rollouts/events` or `ranks/lost`."""
    figures: dict[str, float] = {"complaints": sum(len(result.complaints) for result in results)}
    for result in results:
        name, seconds = result.scene, sorted(event.seconds for event in result.events)
        figures[f"{name}/events"] = len(seconds)
        figures |= {f"{name}/{what}": n for what, n in Counter(event.outcome for event in result.events).items()}
        if seconds:
            figures |= {f"{name}/median_s": seconds[len(seconds) // 2], f"{name}/max_s": seconds[-1]}
        if result.balance is not None:
            found = asdict(result.balance)
            figures |= {f"{name}/{key}": len(v) if isinstance(v, list) else v for key, v in found.items()}
    return figures


def grid(results: Sequence[Result]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return a table of the scenes: events, outcomes, seconds and rows."""
    header = (
        "host with",
        "lost",
        *WORSE,
        "median s",
        "most s",
        "steps",
        "undone",
        "rows",
        "lost rows",
        "twice",
        "wrong",
    )
    found, rows = summarise(results), list[Sequence[str]]()
    for result in results:
        keys = ("events", *WORSE, "median_s", "max_s", "steps", "undone", "rows_trained", "lost", "twice", "wrong")
        rows.append((result.scene, *(f"{found.get(f'{result.scene}/{key}', 0):.0f}" for key in keys)))
    return header, rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill, print what became of the runs, and return the exit code: 1 if a promise was broken."""
    parser = Parser("drill-hosts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAMES", help=f"some of {', '.join(SCENES)}")
    parser.add_argument("--times", type=int, metavar="N", help="times that a host is lost in each scene; default: 5, 2")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of hosts and times")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-hosts-...")
    arguments = parser.parse_args(argv)
    return ended(lambda: _drill(arguments))


def _drill(arguments: argparse.Namespace) -> int:
    only = known("--only", chosen(arguments.only, SCENES), tuple(SCENES))
    if reason := namespaces.why_no_hosts():
        raise UserError(f"drill-hosts: this machine {reason}, expected one that can make hosts")
    out = results_folder(arguments, "lost-hosts", new=True)
    results, facts = run_drill(out, only, arguments.times, arguments.seed, lambda line: print(line, flush=True))
    complaints = [line for result in results for line in result.complaints]
    text = [*markdown(*grid(results)), "", "## Failed", "", *(f"- {line}" for line in complaints or ["nothing"])]
    text += ["", "## Events", ""]
    text += [
        f"- {event.scene}: {event.host} ({', '.join(event.had)}) {event.how} at step {event.step}: {event.outcome}, "
        f"{event.seconds:.0f} s. {' / '.join(event.sentences)}"
        for result in results
        for event in result.events
    ]
    command = f"make drill-hosts ARGS='--only={','.join(only)} --seed={arguments.seed}'"
    print(f"report: {write_page(out / 'report.md', 'lost hosts', command, text, facts)}")
    return FAILED if complaints else DONE


if __name__ == "__main__":
    sys.exit(main())
