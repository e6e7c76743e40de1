"""Kills real runs of long episodes, and checks what they trained on: `make drill-agents`.

Without faults, and with the whole run or one of its processes killed (SIGKILL) at random moments, each prompt must be
trained on once, with the tokens that the engines made, and episodes must be as long as without faults.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headrace import make_tiny_model
from headrace.actors.environments.recovery import TurnRecord
from headrace.actors.rollout.journal_segments import read_body, read_heads
from headrace.bench.records import conditions, markdown, write_page, write_summary
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.outcome import DONE, FAILED
from headrace.cli.terminal import status_line
from headrace.codecs import messages
from headrace.tests.drills.agents.accounts import Accounts, accounts, chance, power
from headrace.tests.drills.agents.recording import SITE
from headrace.tests.drills.agents.skewed_game import LONG_OF, LONGEST
from headrace.tests.drills.chaos.control import NotesTail
from headrace.tests.drills.chaos.injured_run import InjuredRun
from headrace.tests.drills.chaos.ledger import Balance, balance

GROUP_SIZE = 4
START_S, END_S = 240.0, 900.0
"""Seconds within which a run must make its first answer, and within which the last life must end."""
LEVEL = 0.01
VICTIMS = ("driver", "rollout actor", "engine actor", "environment")
"""Processes of which chaos kills one at a time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the drill."""

    name: str
    recover: str = "turn"
    kills: int = 20
    chaos: bool = False
    """True if one process is killed at a time, and False if the whole run is."""
    steps: int = 16
    prompts: int = 32
    wait_s: float = 0.2
    """Seconds between two turns. A long episode takes about LONGEST times as long."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    plan: Plan
    killed: list[str] = field(default_factory=list)
    launches: int = 1
    seconds: float = 0.0
    balance: Balance | None = None
    accounts: Accounts = field(default_factory=Accounts)
    complaints: list[str] = field(default_factory=list)


def config_of(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "run": {
            "dir": str(folder), "name": plan.name, "seed": plan.seed, "checkpoint_every": 1, "max_restarts": 1_000_000,
            "trace_step": 0,
        },
        "algorithm": {
            "mode": "async", "steps": plan.steps, "prompts_per_step": plan.prompts, "group_size": GROUP_SIZE,
        },
        "rollout": {"engine": "scripted", "num_engines": 2, "num_actors": 2, "max_new_tokens": 6 * LONGEST},
        "environment": {
            "kind": "headrace.tests.drills.agents.skewed_game:SkewedGame", "recover": plan.recover, "retries": 20,
            **({"recover_tokens": 2} if plan.recover == "prefix" else {}),  # Half of a turn.
            "options": {"wait_s": plan.wait_s, "apart": plan.chaos},
        },
        "reward": {"functions": [{"kind": "environment"}]},
        "data": {"train": "task:reverse", "options": {"min_digits": 3, "max_digits": 8}, "max_prompt_tokens": 16},
        "trainer": {"backend": "scripted"},
        "scripted": {"latency_s": 0.05, "latency_sigma": 0.5, "train_row_s": 0.0, "train_step_s": 0.02},
        "dataplane": {"store": {"kind": "simple", "capacity_mib": 64}, "timeout_s": 10.0, "trusted_network": True},
        "sync": {"timeout_s": 20.0},
        "model": {"path": str(folder.with_name("model"))},
        "validation": {"every": 0},
        "resources": {"threads": 1, "stage_timeout_s": 60.0, "start_timeout_s": 240.0},
        "logging": {"tensorboard": False, "samples": {"every": 0}},
    }  # fmt: skip


def play(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Outcome:
    """Start a run, kill it as often as the plan says, resume it whenever it has ended, and return what became of it."""
    folder.mkdir(parents=True)
    make_long_model(folder.absolute() / "model")
    run = InjuredRun(folder.absolute(), lambda path: config_of(plan, path), SITE)
    outcome, dice, began = Outcome(plan), random.Random(plan.seed), time.monotonic()
    journaled: list[tuple[str, list[int]]] = []
    run.start(resume=False)
    try:
        while len(outcome.killed) < plan.kills and _lives(run, dice):
            victim = dice.choice(VICTIMS) if plan.chaos else "everything"
            if not _kill(run, victim, dice):
                continue
            outcome.killed.append(victim)
            tell(f"{plan.name}: {len(outcome.killed)} of {plan.kills} kills ({victim})")
            if victim in ("driver", "everything"):
                run.left_behind() if victim == "driver" else run.end()
                journaled += recorded_turns(run.folder / "journal")
            _goes_on(run)
        tell(f"{plan.name}: to its end")
        _wait_for_end(run, outcome)
    finally:
        run.end()
    notes = run.control.notes()
    outcome.seconds, outcome.launches = time.monotonic() - began, run.launches
    outcome.balance = balance(notes, prompts_per_step=plan.prompts, group_size=GROUP_SIZE)
    outcome.accounts = accounts(notes, journaled if plan.recover != "restart" else ())
    outcome.complaints += _complaints(outcome)
    return outcome


def make_long_model(folder: Path) -> None:
    """Make the tiny model with a context that has room for a long episode. The scripted engine only reads its files."""
    path = Path(make_tiny_model(folder, steps=1)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 256}))


def _lives(run: InjuredRun, dice: random.Random) -> bool:
    """Wait until the run has made answers in this life, and up to eight seconds more.

    A run without a checkpoint cannot be resumed, so that the first life also lasts until there is one. Returns False
    once the run has ended by itself."""
    tail, deadline = NotesTail(run.control), time.monotonic() + START_S
    tail.new()
    made = False
    while not made or not any(run.folder.glob("checkpoints/step_??????.json")):
        made = made or any("made" in note for note in tail.new())
        if run.returncode == 0:
            return False
        _goes_on(run)
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run made no answer for {START_S:g} s:\n{run.output[-2000:]}")
        time.sleep(0.1)
    time.sleep(dice.uniform(0.5, 8.0))
    return run.returncode is None


def _goes_on(run: InjuredRun) -> None:
    """Start the driver again if it has ended before the run's end."""
    if run.returncode is None:
        return
    if run.returncode in (0, 2):
        raise RuntimeError(f"the run ended with the exit code {run.returncode}:\n{run.output[-2000:]}")
    run.left_behind()
    run.start(resume=True)


def _kill(run: InjuredRun, victim: str, dice: random.Random) -> bool:
    """Kill the whole run, or one process of a kind. Returns False if there is none just now."""
    kinds = run.look()
    if victim == "everything":
        targets = list(run.family)
    elif victim == "environment":
        targets = dice.sample(found, 1) if (found := _environments(run)) else []
    else:
        targets = dice.sample(found, 1) if (found := kinds.get(victim, [])) else []  # type: ignore[call-overload]
    for target in targets:
        with suppress(psutil.NoSuchProcess):
            target.send_signal(signal.SIGKILL)
    while victim == "driver" and targets and run.returncode is None:
        time.sleep(0.05)  # `psutil.wait_procs` would take the exit code from the driver's own handle.
    return bool(targets)


def _environments(run: InjuredRun) -> list[psutil.Process]:
    found = []
    for process in run.family:
        with suppress(psutil.Error):
            command = process.cmdline()
            if any("user_process_child" in part for part in command) and "process_keeper" not in " ".join(command[:5]):
                found.append(process)
    return found


def _wait_for_end(run: InjuredRun, outcome: Outcome) -> None:
    deadline = time.monotonic() + END_S
    while run.returncode != 0:
        _goes_on(run)
        if time.monotonic() > deadline:
            outcome.complaints.append(f"the run did not end within {END_S:g} s of the last kill")
            return
        time.sleep(0.2)


def recorded_turns(folder: Path) -> list[tuple[str, list[int]]]:
    """Return the answers that the journal of turns holds, as (episode, token ids)."""
    found = []
    for path in folder.glob("*.turns"):
        for offset, _ in read_heads(path, 0)[0]:
            record = messages.decode(read_body(path, offset)[1], TurnRecord)
            episode = record.request_id.partition("/")[0]
            found += [(episode, completion.token_ids.tolist()) for completion in record.completions]
    return found


def _complaints(outcome: Outcome) -> list[str]:
    assert outcome.balance is not None
    said, found = list(outcome.balance.complaints), outcome.accounts
    if outcome.balance.steps != outcome.plan.steps:
        said.append(f"{outcome.balance.steps} steps were finished, expected {outcome.plan.steps}")
    for what, where in (("that no engine made", found.foreign), ("used twice", found.twice), ("lost", found.lost)):
        if where:
            said.append(f"{len(where)} answers {what}: {', '.join(where[:3])}")
    return said


# ---------------------------------------------------------------- the report


def figures_of(outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    """Return the figures of a run, and the p-values of its lengths against those of the run without faults."""
    turns, tokens = list(outcome.accounts.turns.values()), list(outcome.accounts.tokens.values())
    same = outcome is plain
    return {
        "kills": len(outcome.killed),
        "launches": outcome.launches,
        "seconds": round(outcome.seconds, 1),
        "episodes": len(turns),
        "trained_once": len(turns) - len(outcome.balance.twice) if outcome.balance else 0,
        "lost": len(outcome.balance.lost) if outcome.balance else 0,
        "long_share": round(sum(count == LONGEST for count in turns) / max(len(turns), 1), 4),
        "mean_turns": round(sum(turns) / max(len(turns), 1), 3),
        "mean_tokens": round(sum(tokens) / max(len(tokens), 1), 2),
        "p_turns": None if same else chance(list(plain.accounts.turns.values()), turns),
        "p_tokens": None if same else chance(list(plain.accounts.tokens.values()), tokens),
        "complaints": outcome.complaints,
    }


def run_drill(plans: Sequence[Plan], out: Path, tell: Callable[[str], None], command: str) -> list[str]:
    """Play the plans, write summary.json and report.md into `out`, and return the complaints.

    plans: the first one has no kills, and the others are compared with it."""
    facts, outcomes = conditions(), [play(plan, out / plan.name, tell) for plan in plans]
    figures = {outcome.plan.name: figures_of(outcome, outcomes[0]) for outcome in outcomes}
    complaints = [f"{outcome.plan.name}: {line}" for outcome in outcomes for line in outcome.complaints]
    for outcome in outcomes[1:]:
        found = figures[outcome.plan.name]
        if outcome.plan.recover != "restart" and min(found["p_turns"], found["p_tokens"]) < LEVEL:
            complaints.append(f"{outcome.plan.name}: its episodes have other lengths than those without faults")
    count, share = min(f["episodes"] for f in figures.values()), 1 / LONG_OF
    seen = {f"{cut:.0%}": round(power(count, share, share * (1 - cut), LEVEL), 3) for cut in (0.2, 0.3, 0.5)}
    flat = {f"{n}/{k}": v for n, f in figures.items() for k, v in f.items() if k != "complaints" and v is not None}
    write_summary(out / "summary.json", {**flat, **{f"power/{cut}": value for cut, value in seen.items()}}, facts)
    header = ["run", *(key for key in next(iter(figures.values())) if key != "complaints")]
    rows = [[name, *("-" if f[key] is None else str(f[key]) for key in header[1:])] for name, f in figures.items()]
    text = [
        *markdown(header, rows), "",
        f"Lengths are compared by permutation tests of the means at the level {LEVEL}, over two samples. With {count} "
        "episodes each, it notices that a part of the long episodes is missing with this probability: "
        + ", ".join(f"{cut} missing: {value}" for cut, value in seen.items()) + ".",
        "", "## Failed", "", *(f"- {line}" for line in complaints or ["nothing"]), "",
        *(f"- {outcome.plan.name}: {asdict(outcome.plan)}" for outcome in outcomes),
    ]  # fmt: skip
    write_page(out / "report.md", "agents", command, text, facts)
    return complaints


def plans_of(kills: int, steps: int, prompts: int, seed: int, only: Sequence[str] = ()) -> list[Plan]:
    """Return the plans of the drill: without faults, kills of the whole run with each kind of recovery, and chaos."""
    size: dict[str, Any] = {"steps": steps, "prompts": prompts, "seed": seed}
    plans = [
        Plan("plain", kills=0, **size),
        Plan("turn", kills=kills, **size),
        Plan("prefix", recover="prefix", kills=(kills + 1) // 2, **size),
        Plan("restart", recover="restart", kills=kills, **size),
        Plan("chaos", kills=2 * kills, chaos=True, **size),
    ]
    return [plan for plan in plans if not only or plan.name in ("plain", *only)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill, and return the exit code: 1 if a promise was broken."""
    parser = Parser("drill-agents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="kills of each run, twice as many in chaos")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps of each run")
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="prompts of each step")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="some of turn, prefix, restart and chaos, with commas"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the moments and the victims")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    arguments = parser.parse_args(argv)
    return ended(lambda: _drill(arguments))


def _drill(arguments: argparse.Namespace) -> int:
    out = results_folder(arguments, "agents", new=True)
    only = list(filter(None, arguments.only.split(",")))
    plans = plans_of(arguments.kills, arguments.steps, arguments.prompts, arguments.seed, only)
    command = f"make drill-agents ARGS='--kills={arguments.kills} --steps={arguments.steps}'"
    with status_line("starting") as (console, tell):
        complaints = run_drill(plans, out, tell, command)
    console.print((out / "report.md").read_text(), highlight=False, markup=False, soft_wrap=True)
    return FAILED if complaints else DONE


if __name__ == "__main__":
    sys.exit(main())
