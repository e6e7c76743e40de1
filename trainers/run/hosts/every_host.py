"""Compares the hosts of a run on a joined Ray cluster before anything of the run starts on them.

    question -> a HostProbe on each node, all at once -> HostFacts -> findings, each with its host

A finding that would end the run, or spoil it silently, refuses the start; all sentences come together. Modules of the
user that a host lacks are shipped to it (`resources.ship`), and the host is asked again.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...cluster.places.placement import ON_CPUS, Placement
from ...errors import ConfigError, UserError
from . import host_facts
from .host_findings import AskedHost, Demands, Finding, HostFacts, judge
from .shipped_modules import ShippedModules, modules_beside, named_modules

CLOCK_ROUNDS = 4
_WAIT_S = 1.0
"""Seconds of each wait for Ray, which blocks signals meanwhile."""


def hosts_of(placement: Placement) -> list[AskedHost]:
    """Return the hosts on which a run has actors. With a placement that does not name them, as ON_CPUS, these are all
    hosts of the cluster."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    # A host that was lost and has come back can be listed twice for a while.
    names = [name for name, _ in {(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in alive}]
    seats = [(placement.hosts[seat.host].node, seat) for seat in placement.seats if seat.host is not None]
    hosts = []
    for node in alive:
        number, name, address = node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]
        own = [seat for place, seat in seats if place == number]
        if own or not seats:
            label = name if names.count(name) == 1 else f"{name} ({address})"
            actors = tuple(seat.name for seat in own) or None
            hosts.append(AskedHost(number, label, address, actors, len({gpu for seat in own for gpu in seat.gpus})))
    return hosts


class HostChecks:
    """Compares the hosts of a run: all together at its start, and each one that it uses later when that has room."""

    def __init__(self, demands: Demands, tell: Callable[[str], None], later_s: float = 60.0) -> None:
        """tell: receives sentences for the user. later_s: largest number of seconds to wait for a later host."""
        self._demands, self._tell, self._later_s = demands, tell, later_s
        self._shipped = ShippedModules()
        self._verdicts: dict[str, bool] = {}
        """Ray's id of each host that was asked later -> whether the run can use it."""

    def at_start(self, hosts: Sequence[AskedHost], *, with_notes: bool = True) -> None:
        """Ask all hosts at once. with_notes: whether `tell` receives sentences about differences that do not matter.

        Raises ConfigError with a sentence for each one that does. A no-op for a run that is on the driver's host alone,
        which was checked before."""
        if {host.node for host in hosts} <= {ray.get_runtime_context().get_node_id()}:
            return
        for note in self._demands.in_clear(hosts):
            self._tell(f"note: {note}; see docs/reference/security.md")
        findings, self._shipped = examine_hosts(self._demands, hosts)
        for finding in findings:
            if finding.level == "note" and with_notes:
                self._tell(f"note: {finding.sentence}")
        problems = [finding.sentence for finding in findings if finding.level == "problem"]
        if problems:
            raise ConfigError(problems)

    def options(self) -> dict[str, Any]:
        """Return Ray's options with which an actor finds modules that its host may lack."""
        return self._shipped.options()

    def fits(self, node: str) -> bool:
        """Return whether the run can use a host that was not there at its start, given by Ray's id. The user reads of a
        host that differs once, and the run goes on without it."""
        if node in self._verdicts:
            return self._verdicts[node]
        asked = [host for host in hosts_of(ON_CPUS) if host.node == node]
        if not asked:
            return False
        timeout_s = min(self._later_s, self._demands.config.resources.start_timeout_s)
        findings, shipped = examine_hosts(self._demands, asked, timeout_s)
        problems = [finding.sentence for finding in findings if finding.level == "problem"]
        if problems:
            self._tell(f"host {asked[0].label} is not used, because it differs: {'; '.join(problems)}")
        elif shipped.paths:
            self._shipped = shipped
        self._verdicts[node] = not problems
        return not problems


def examine_hosts(
    demands: Demands, hosts: Sequence[AskedHost], timeout_s: float | None = None
) -> tuple[list[Finding], ShippedModules]:
    """Ask all hosts, and return all findings and the modules that must be shipped. timeout_s: largest number of seconds
    to wait for a host; None stands for `resources.start_timeout_s`."""
    question, shipped = demands.question(), ShippedModules()
    with _marked(demands.shared) as marks:
        question |= {"shared": {key: str(mark) for key, mark in marks.items()}}
        timeout_s = timeout_s or demands.config.resources.start_timeout_s
        answers = ask(hosts, question, timeout_s)
        ship = demands.config.resources.ship
        lacking = [host for host in hosts if _lacks_modules(answers[host.node])]
        if ship != "never" and (lacking or ship != "auto"):
            shipped = ShippedModules(tuple(_to_ship(ship, [answers[host.node] for host in lacking])))
        if shipped.paths and lacking:
            answers |= ask(lacking, question, timeout_s, shipped.options())
        answers = {node: _confirmed(marks, node, answer) for node, answer in answers.items()}
    findings = judge(demands, hosts, answers)
    if shipped.paths:
        names, where = ", ".join(map(os.path.basename, shipped.paths)), ", ".join(host.label for host in lacking)
        why = f"because {where} cannot import them" if lacking else "as the key says"
        said = f"resources.ship: {names} are sent to the run's processes, {why}"
        findings.append(Finding(hosts[0].label, "shipped", "note", names, said))
    return findings, shipped


def _lacks_modules(answer: HostFacts | str) -> bool:
    return isinstance(answer, HostFacts) and any(absent for _, absent in answer.modules.values())


def _to_ship(ship: Sequence[str] | str, answers: Iterable[HostFacts | str]) -> list[str]:
    """Return the paths of the modules that the user names, or else of those in the folders of what hosts lack."""
    if not isinstance(ship, str):
        return named_modules(ship)
    facts = [answer for answer in answers if isinstance(answer, HostFacts)]
    names = {absent.partition(".")[0] for one in facts for _, absent in one.modules.values() if absent}
    return list(dict.fromkeys(path for name in sorted(names) for path in modules_beside(name)))


def _confirmed(marks: Mapping[str, Path], node: str, answer: HostFacts | str) -> HostFacts | str:
    """Return the answer of a node, with the folders in which its mark has not arrived here."""
    if isinstance(answer, str):
        return answer
    seen = {
        key: said or ("" if (marks[key] / node).is_file() else "writes elsewhere than to")
        for key, said in answer.shared.items()
    }
    return replace(answer, shared=seen)


@contextlib.contextmanager
def _marked(shared: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Context manager that makes a new folder in each folder to share, in which each host leaves a mark."""
    marks = {key: folder / f".headrace-hosts-{secrets.token_hex(8)}" for key, folder in shared.items()}
    try:
        for key, mark in marks.items():
            try:
                mark.mkdir()
                (mark / "driver").touch()
            except OSError as error:
                raise UserError(
                    f"{key}: {mark.parent} cannot be written here ({error.strerror}), expected a folder to write in"
                ) from error
        yield marks
    finally:
        for mark in marks.values():
            shutil.rmtree(mark, ignore_errors=True)


# ---------------- These functions ask the hosts.


@contextlib.contextmanager
def probes(hosts: Sequence[AskedHost], options: Mapping[str, Any] = {}) -> Iterator[dict[str, Any]]:
    """Context manager that starts a `HostProbe` on each host, and yields them by the ids of their nodes."""
    cloudpickle.register_pickle_by_value(host_facts)
    kind: Any = ray.remote(host_facts.HostProbe)
    started: dict[str, Any] = {}
    try:
        for host in hosts:
            place = NodeAffinitySchedulingStrategy(host.node, soft=False)
            wanted = {"num_cpus": 0, "scheduling_strategy": place, **options}
            started[host.node] = kind.options(**wanted).remote()
        yield started
    finally:
        for probe in started.values():
            ray.kill(probe)


def ask(
    hosts: Sequence[AskedHost], question: Mapping[str, Any], timeout_s: float, options: Mapping[str, Any] = {}
) -> dict[str, HostFacts | str]:
    """Ask all hosts at once. Returns the facts by node, or a text why there are none."""
    with probes(hosts, options) as started:
        calls = {probe.facts.remote({**question, "node": node}): node for node, probe in started.items()}
        told = gathered(calls, timeout_s)
        clocks = {node: _clock(started[node]) for node, answer in told.items() if not isinstance(answer, str)}
    return {
        node: answer if isinstance(answer, str) else HostFacts(**answer, **clocks[node])
        for node, answer in told.items()
    }


def gathered(calls: Mapping[Any, str], timeout_s: float) -> dict[str, Any]:
    """Wait for calls, and return their results by the nodes that `calls` gives. The result of a node that fails, or
    that does not answer in time, is a text that says so."""
    deadline, left = time.monotonic() + timeout_s, list(calls)
    results: dict[str, Any] = {}
    while left and (wait_s := deadline - time.monotonic()) > 0:
        ready, left = ray.wait(left, num_returns=len(left), timeout=min(wait_s, _WAIT_S))
        for call in ready:
            try:
                results[calls[call]] = ray.get(call)
            except RayError as error:
                said = str(error).strip().splitlines() or [""]
                results[calls[call]] = f"its probe failed: {type(error).__name__}: {said[-1].strip()}"
    return results | {calls[call]: f"it did not answer within {timeout_s:g} s" for call in left}


def _clock(probe: Any) -> dict[str, Any]:
    """Return by how much a host's clock is ahead of this one's, and the largest error. The fastest of several round
    trips counts."""
    best = {"clock_s": 0.0, "clock_error_s": math.inf}
    for _ in range(CLOCK_ROUNDS):
        asked = time.time()
        found = gathered({probe.clock.remote(): "clock"}, 10 * _WAIT_S)["clock"]
        answered = time.time()
        if isinstance(found, float) and (answered - asked) / 2 < best["clock_error_s"]:
            best = {"clock_s": found - (asked + answered) / 2, "clock_error_s": (answered - asked) / 2}
    return best
