"""Judges the facts that the hosts of a run have told, by what the run demands of its hosts."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ....dataplane.security.ray_certificates import ray_uses_tls
from ....dataplane.security.run_key import fingerprint, key_from_file
from ....dataplane.store_choice import store_kind
from ...config.config import Config
from ..checks.extras import Need, packages_of_actors
from . import host_facts

CLOCK_S = 0.5
"""Smallest difference in seconds between two clocks that the user hears of."""
_PLUG_IN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_KINDS = {
    "vllm": ("vllm", "rollout.engine=vllm", "vllm"),
    "megatron": ("megatron", "trainer.backend=megatron", "megatron"),
    "mooncake": ("mooncake", "dataplane.store.kind=mooncake", "mooncake"),
    "verifiers": ("verifiers", "environment.kind=verifiers", "verifiers"),
    "textarena": ("textarena", "environment.kind=textarena", "textarena"),
}
"""Kind of an engine, backend, store or environment -> what it needs on each host."""

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The answer of a host about itself, as `HostProbe.facts` and `own_facts` find it."""

    resolves: bool
    """Whether its own name stands for an address there."""
    versions: Mapping[str, str]
    user: int
    umask: str
    shm_bytes: int
    """Free bytes of /dev/shm."""
    temporary: str
    """Why no temporary file can be written, or ""."""
    settings: Mapping[str, str]
    """Environment variables of libraries."""
    num_gpus: int
    has_folder: bool = True
    """Whether it has the driver's working folder."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Key of a folder that all hosts must share -> the verb of a sentence about it; "" if this host shares it."""
    absent_paths: Sequence[str] = ()
    modules: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Each `module:name` of the user -> the error of its import and the module that is absent, or two empty texts."""
    absent_packages: Sequence[str] = ()
    network: Sequence[str] = ()
    """Sentences about `resources.interface` and `resources.ports`."""
    key_file: str = ""
    """Sentence about `dataplane.key_file`; "" if it gives the driver's key."""
    clock_s: float = 0.0
    """Seconds by which its clock is ahead of the driver's."""
    clock_error_s: float = math.inf
    """Largest error of `clock_s`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of one host."""

    host: str
    what: str
    """Name of the check: a row of the table that `headrace doctor --cluster` prints."""
    level: Level
    short: str
    """A few words for the table."""
    sentence: str = ""
    """Sentence for the user, which names the host; "" for a result that is right."""


@dataclass(frozen=True, slots=True)
class AskedHost:
    """One host that is asked."""

    node: str
    """Ray's id of its node."""
    label: str
    """Name of the host, with its address if two hosts have one name."""
    address: str
    actors: tuple[str, ...] | None = None
    """Names of the run's actors there; None while they are not known."""
    num_gpus: int = 0
    """Number of GPUs that the run uses there."""

    def has(self, kind: str) -> bool:
        """Return whether an actor of a kind, such as `rollout`, is or may be on this host."""
        return self.actors is None or any(name.startswith(kind) for name in self.actors)


@dataclass(frozen=True, slots=True)
class Demands:
    """What a run demands of its hosts."""

    config: Config
    """The configuration, with `run.dir` set."""

    @property
    def modules(self) -> list[str]:
        """Every `module:name` in the configuration that can be imported on the driver's host."""
        named = filter(_PLUG_IN.fullmatch, self.config.texts)
        return [path for path in named if _has_spec(re.split("[.:]", path)[0])]

    @property
    def paths(self) -> dict[str, str]:
        """Paths of models and data that exist on the driver's host -> their keys."""
        config, models = self.config, [("model.path", self.config.model.path), *self.config.other_models]
        named = [*models, ("model.adapter", config.model.adapter), *config.sources, ("run.replay", config.run.replay)]
        return {path: key for key, path in reversed(named) if path and os.path.exists(os.path.expanduser(path))}

    @property
    def shared(self) -> dict[str, Path]:
        """Folders that hosts must share, by their keys. For one that does not exist yet, it is the nearest above it."""
        config = self.config
        folders = {"run.dir": Path(config.run.dir or ".")}
        if config.sync.transport == "disk" and config.sync.dir:
            folders["sync.dir"] = Path(config.sync.dir)
        return {key: next(one for one in (path, *path.parents) if one.is_dir()) for key, path in folders.items()}

    @property
    def needs(self) -> list[Need]:
        """Optional packages that the run's actors import."""
        config = self.config
        kinds = (config.rollout.engine, config.trainer.backend, self.store, config.environment.kind)
        rubrics = config.rubrics.values()
        needs = packages_of_actors(
            config.rollout, config.sources, rubrics, renderer=config.model.renderer, store=self.store
        )
        tls = [("cryptography", "dataplane.tls", "tls")] if config.dataplane.tls else []
        return [*needs, *tls, *(_KINDS[kind] for kind in kinds if kind in _KINDS)]

    @property
    def store(self) -> str:
        """Kind of the store on several hosts."""
        return store_kind(self.config.dataplane, one_host=False)

    def uses_of(self, key: str, host: AskedHost) -> list[str]:
        """Return for what the actors of a host need a shared folder."""
        config, run = self.config, self.config.run
        if key == "sync.dir":
            return ["the weights of sync.transport=disk"]
        uses = ["checkpoints and the trained model"] if host.has("train worker") else []
        if host.has("rollout") and run.keeps_journal:
            uses.append("the journal")
        if host.has("rollout") and config.logging.samples.every:
            uses.append("samples.jsonl")
        rounds = config.trainer.lora.rounds and config.trainer.lora.base != "model"
        if config.model.builtin or config.warmup.on_file or rounds:
            uses.append("the model that the run makes")
        if config.sync.transport == "disk" and not config.sync.dir:
            uses.append("the weights of sync.transport=disk")
        return uses

    def in_clear(self, hosts: Sequence[AskedHost]) -> Iterator[str]:
        """Return a sentence for each kind of connection between hosts that is not encrypted."""
        if not ray_uses_tls():
            yield (
                "Ray's connections between the hosts are not encrypted (RAY_USE_TLS is unset), so readers of their "
                "packets learn Ray's token and can run code on all hosts"
            )
        carried = ["gradients"] if sum(host.has("train worker") for host in hosts) > 1 else []
        transport, on_gpus = self.config.sync.transport, any(host.num_gpus for host in hosts)
        if transport == "collective" or (transport == "pairs" and on_gpus):  # Between CPUs, it uses TCP.
            carried.append(f"the weights of sync.transport={transport}")
        if self.config.dataplane.tls and carried:
            yield f"dataplane.tls does not encrypt {' and '.join(carried)}, which gloo or NCCL carry between the hosts"

    def question(self) -> dict[str, Any]:
        """Return what `HostProbe.facts` asks, but for the node."""
        path = self.config.dataplane.key_file
        return {
            "key_file": (path, fingerprint(key_from_file(path, "", tls=False))) if path else (),
            "folder": os.getcwd(),
            "paths": list(self.paths),
            "modules": self.modules,
            "needs": sorted({package for package, _, _ in self.needs}),
            "interface": self.config.resources.interface,
            "ports": self.config.resources.ports,
            "num_ports": self.config.num_ports,
        }


def _has_spec(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # `__main__` has no spec.
        return False


def judge(
    demands: Demands, hosts: Sequence[AskedHost], answers: Mapping[str, HostFacts | str], here: HostFacts | None = None
) -> list[Finding]:
    """Return the findings of all hosts. answers: facts by node, or a text why there are none. here: facts about the
    driver's host; None collects them."""
    findings, here = [], here or HostFacts(**host_facts.own_facts())
    for host in hosts:
        facts = answers[host.node]
        if isinstance(facts, str):
            said = f"resources.ray_address: host {host.label} could not be checked: {facts}"
            findings.append(Finding(host.label, "answer", "problem", facts, said))
            continue
        findings += _Judge(demands, host, facts, here).findings()
        if host.label.endswith(")"):
            said = f"host {host.label} has the name of another host, so messages name its address, too"
            findings.append(Finding(host.label, "name", "note", "not unique", said))
    return [*findings, *_different_settings(hosts, answers)]


@dataclass(frozen=True, slots=True)
class _Judge:
    """Judges one host."""

    demands: Demands
    host: AskedHost
    facts: HostFacts
    here: HostFacts

    def findings(self) -> list[Finding]:
        """Return the findings, in the order of the table."""
        checks = (self._versions, self._folders, self._imports, self._files, self._machine, self._processes)
        return [finding for check in checks for finding in check()]

    def _found(self, what: str, right: bool, short: str, sentence: str, level: Level = "problem") -> Finding:
        """Return the finding of a check. sentence: for the user if the host is not `right`, with `HOST` for it."""
        if right:
            return Finding(self.host.label, what, "ok", short)
        return Finding(self.host.label, what, level, short, sentence.replace("HOST", f"host {self.host.label}"))

    def _versions(self) -> Iterator[Finding]:
        missing = "headrace" not in self.facts.versions
        for package in ("Python", "headrace", *host_facts.PACKAGES):
            there, here = self.facts.versions.get(package), self.here.versions.get(package)
            same = there == here or (package != "headrace" and None in (there, here))
            said = f"HOST has {package} {there}, expected {here} as on the driver's host"
            if missing and package == "headrace":
                said = "HOST cannot import headrace, expected the installation of the driver's host"
            yield self._found(package, same, there or "-", said)

    def _folders(self) -> Iterator[Finding]:
        config = self.demands.config
        for key, wrong in self.facts.shared.items():
            path, uses = config.run.dir if key == "run.dir" else config.sync.dir, self.demands.uses_of(key, self.host)
            said = f"{key}: HOST {wrong} {path}"
            if uses:
                said += f", expected a folder that all hosts share, because its processes need it for {', '.join(uses)}"
            else:
                said += "; nothing of the run there needs it"
            yield self._found(key, not wrong, wrong or "shared", said, "problem" if uses else "note")
        said = f"HOST lacks the working folder {os.getcwd()}, so relative paths mean others there"
        has = self.facts.has_folder
        yield self._found("folder", has, "same" if has else "missing", said, "note")

    def _imports(self) -> Iterator[Finding]:
        for path, (error, absent) in self.facts.modules.items():
            cure = "it to work there"
            if absent:
                cure = (
                    f"{absent!r} there: install it on all hosts, share the folder {os.getcwd()}, or name the files in "
                    "resources.ship"
                )
            said = f"HOST cannot import {path!r}: {error}; expected {cure}"
            # Any other error may come from the probe, which has no GPU.
            certain = absent or error.startswith(("ImportError", "SyntaxError", host_facts.NO_NAME))
            yield self._found(path, not error, error or "imports", said, "problem" if certain else "note")
        missing = [need for need in self.demands.needs if need[0] in self.facts.absent_packages]
        for package, what, extra in missing:
            said = f"HOST lacks {package}, which {what} needs: pip install 'headrace[{extra}]' there"
            yield self._found("extras", False, f"lacks {package}", said)

    def _files(self) -> Iterator[Finding]:
        read_by_rollouts = {key for key, _ in self.demands.config.sources}
        for path, key in self.demands.paths.items():
            needed = key not in read_by_rollouts or self.host.has("rollout")
            there = path not in self.facts.absent_paths or not needed
            said = f"{key}: got {path!r}, which HOST does not have; expected a path of all hosts"
            yield self._found(key, there, "there" if there else "missing", said)

    def _machine(self) -> Iterator[Finding]:
        mib, free = self.demands.config.dataplane.store.capacity_mib, self.facts.shm_bytes
        rows = self.demands.store == "tcp" and (self.host.has("rollout") or self.host.has("train worker"))
        said = (
            f"dataplane.store.capacity_mib: got {mib}, but /dev/shm of HOST has {free >> 20} MiB left; expected at "
            "most that: lower it, or give /dev/shm more room (docker: --shm-size)"
        )
        yield self._found("/dev/shm", not rows or free >= mib << 20, f"{free >> 20} MiB", said)
        full = self.facts.temporary
        said = f"HOST cannot write temporary files ({full}), expected room for them"
        yield self._found("temporary", not full, full or "writable", said)
        gpus = self.facts.num_gpus
        said = f"HOST has {gpus} GPU(s), expected {self.host.num_gpus}, which Ray gives the run there (--num-gpus)"
        yield self._found("GPUs", gpus >= self.host.num_gpus, str(gpus), said)
        for error in self.facts.network:
            yield self._found("network", False, error, f"HOST: {error}")
        if self.facts.key_file:
            yield self._found("key file", False, "another", f"HOST: {self.facts.key_file}")

    def _processes(self) -> Iterator[Finding]:
        said = "HOST does not know the address of its own name, which some libraries look up"
        knows = self.facts.resolves
        yield self._found("own name", knows, "known" if knows else "unknown", said, "note")
        for what, there, here in (
            ("user id", str(self.facts.user), str(self.here.user)),
            ("umask", self.facts.umask, self.here.umask),
        ):
            said = f"HOST runs with {what} {there}, and the driver with {here}, so one may lack access to files of the "
            yield self._found(what, there == here, there, said + "other", "note")
        ahead, error = self.facts.clock_s, self.facts.clock_error_s
        said = f"the clock of HOST is {ahead:+.1f} s (± {error:.1g} s) from the driver's, and so are its times in "
        right = not abs(ahead) - error > CLOCK_S
        yield self._found(
            "clock", right, f"{ahead:+.3f} s ± {error:.3f}", said + "trace.json and samples.jsonl", "note"
        )


def _different_settings(hosts: Sequence[AskedHost], answers: Mapping[str, HostFacts | str]) -> Iterator[Finding]:
    """Yield a note for each environment variable that differs between hosts."""
    told = [(host, facts) for host in hosts if isinstance(facts := answers[host.node], HostFacts)]
    for key in sorted({key for _, facts in told for key in facts.settings}):
        (first, value), *others = [(host.label, facts.settings.get(key, "unset")) for host, facts in told]
        for label, there in others:
            if there != value:
                said = f"{key} is {there} for Ray's processes on host {label}, and {value} on {first}"
                yield Finding(label, key, "note", there, said)
