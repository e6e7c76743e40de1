"""Compares all hosts of a Ray cluster for `headrace doctor --cluster`, and measures the links between them."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ....dataplane.listen_address import join_host
from ...cluster.places.placement import ON_CPUS
from ...cluster.ray_cluster import Cluster, CpuDemand
from ..checks.doctor import State
from . import host_facts
from .every_host import examine_hosts, gathered, hosts_of, probes
from .host_findings import AskedHost, Demands, Finding

SENT_BYTES = 64 << 20
"""Bytes that one host sends to another for a measurement."""
MAX_ALL_PAIRS = 16
"""Largest number of hosts of which all pairs are measured; of more hosts, each sends to the next one only."""
_MARKS = {"ok": State.OK, "note": State.NOTE, "problem": State.FIX}


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The findings about the hosts of a cluster, and the speed of the links between them."""

    hosts: Sequence[AskedHost]
    findings: Sequence[Finding]
    links: dict[tuple[str, str], float | str]
    """Sender and receiver -> bytes per second, or the reason why nothing arrived."""
    nccl: str
    """Sentence about NCCL between the hosts."""
    nccl_fails: bool = False

    def sentences(self, level: str) -> list[str]:
        """Return the sentences of one level, `note` or `problem`."""
        found = [finding.sentence for finding in self.findings if finding.level == level]
        if level == "problem":
            links = self.links.items()
            found += [f"host {one} cannot send to {two}: {rate}" for (one, two), rate in links if isinstance(rate, str)]
            found += [self.nccl] if self.nccl_fails else []
        return found


def examine_cluster(address: str, demands: Demands, tell: Callable[[str], None]) -> ClusterReport:
    """Join a Ray cluster, look at its hosts, and leave it. tell: receives what is being done. Raises UserError if it
    cannot be joined."""
    trusted = demands.config.dataplane.trusted_network
    demand, namespace = CpuDemand(0, 0, 0), f"headrace-{uuid.uuid4().hex[:8]}"
    cluster = Cluster(
        address=address, num_cpus=None, demand=demand, namespace=namespace, object_store_mib=0, trusted_network=trusted
    )
    try:
        hosts = hosts_of(ON_CPUS)
        tell(f"comparing {len(hosts)} hosts")
        findings, _ = examine_hosts(demands, hosts)
        silent = {finding.host for finding in findings if finding.what == "answer"}
        answering = [host for host in hosts if host.label not in silent]
        tell("measuring the links")
        links = _links(answering)
        with_gpus = {finding.host for finding in findings if finding.what == "GPUs" and finding.short != "0"}
        pair = [host for host in answering if host.label in with_gpus]
        if len(pair) < 2:
            return ClusterReport(hosts, findings, links, f"NCCL: no GPU on {'any' if not pair else 'another'} host")
        return ClusterReport(hosts, findings, links, *reduce_over(pair, "nccl", {"num_gpus": 1}))
    finally:
        cluster.close()


def tables(report: ClusterReport) -> list[Table]:
    """Return the table of the checks, with a column for each host, and that of the links."""
    names = [host.label for host in report.hosts]
    checks, links = (
        Table("what" if number == 0 else "from", *names, title=title, title_justify="left", title_style="bold")
        for number, title in enumerate(("headrace doctor --cluster", "TCP, Gbit/s"))
    )
    cells = {(one.what, one.host): Text(one.short, style=_MARKS[one.level].value[1]) for one in report.findings}
    for what in dict.fromkeys(finding.what for finding in report.findings):
        checks.add_row(what, *(cells.get((what, name), Text("")) for name in names))
    for one in names:
        rates = [report.links.get((one, two)) for two in names]
        links.add_row(
            one,
            *("" if rate is None else "fails" if isinstance(rate, str) else f"{8 * rate / 1e9:.2f}" for rate in rates),
        )
    return [checks, links] if len(names) > 1 else [checks]


def _links(hosts: Sequence[AskedHost]) -> dict[tuple[str, str], float | str]:
    """Measure the links one after another, so that they do not disturb each other."""
    pairs = list(itertools.permutations(hosts, 2))
    if len(hosts) > MAX_ALL_PAIRS:
        pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    measured: dict[tuple[str, str], float | str] = {}
    with probes(hosts) as started:
        for one, two in pairs:
            took = port = _answer(started[two.node].receive.remote(two.address, SENT_BYTES))
            if isinstance(port, int):
                took = _answer(started[one.node].send.remote(two.address, port, SENT_BYTES))
            measured[one.label, two.label] = SENT_BYTES / took if isinstance(took, float) else str(took)
    return measured


def _answer(call: Any) -> Any:
    return gathered({call: "answer"}, host_facts.TRANSFER_TIMEOUT_S)["answer"]


def reduce_over(hosts: Sequence[AskedHost], backend: str, options: dict[str, Any]) -> tuple[str, bool]:
    """Sum numbers over one process on each host by a backend of torch.distributed. Returns a sentence about it, and
    whether it failed. options: Ray's options for the processes."""
    first, port = hosts[0].address, random.randrange(20_000, 32_000)
    meeting = f"tcp://{join_host(first, port)}"
    with probes(hosts, options) as started:
        calls = {
            started[host.node].reduce.remote(backend, meeting, host.address, rank, len(hosts), SENT_BYTES): host.label
            for rank, host in enumerate(hosts)
        }
        told = gathered(calls, 2 * host_facts.TRANSFER_TIMEOUT_S)
    wrong = [f"{name}: {error}" for name, error in told.items() if not isinstance(error, float)]
    if wrong:
        return f"{backend} between {len(hosts)} hosts fails: {'; '.join(wrong)}", True
    took_ms = 1000 * max(map(float, told.values()))
    return f"{backend}: a sum of {SENT_BYTES >> 20} MiB over {len(hosts)} hosts takes {took_ms:.0f} ms", False
