"""The command that writes the job of a scheduler: launch slurm and launch k8s."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..trainers.errors import UserError
from .arguments import config_and_overrides, path
from .outcome import DONE, FAILED


def add_launch_commands(commands: Any) -> None:
    """Add the commands that write jobs of schedulers."""
    launch = commands.add_parser(
        "launch",
        help="write the job with which Slurm or Kubernetes trains on several hosts",
        description="Write and show the job with which a scheduler trains on several hosts; --submit starts it.",
    )
    kinds = launch.add_subparsers(metavar="SCHEDULER", required=True)
    slurm = _add(kinds, "slurm", _slurm, "write a batch file for sbatch", "job.sh")
    slurm.add_argument("--cpus-per-node", type=_count, metavar="C", help="CPUs of each node; default: whole nodes")
    slurm.add_argument("--partition", metavar="NAME", help="partition of Slurm")
    slurm.add_argument("--account", metavar="NAME", help="account of Slurm")
    slurm.add_argument(
        "--time",
        type=_of_form(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", "minutes, H:MM:SS or D-HH:MM:SS"),
        metavar="LIMIT",
        help="time limit, such as 12:00:00, after which the job is queued again and continues",
    )
    slurm.add_argument("--container", metavar="IMAGE", help="image in which all commands run, by the plugin Pyxis")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="further option, such as --sbatch=--mem=0"
    )
    k8s = _add(kinds, "k8s", _k8s, "write a manifest of a RayJob for KubeRay", "job.yaml")
    k8s.add_argument("--cpus-per-node", type=_count, default=8, metavar="C", help="CPUs of each pod; default: 8")
    size = _of_form(r"\d+(\.\d+)?([KMGTP]i|[kMGTP])", "a number with a unit, such as 64Gi")
    k8s.add_argument("--memory", type=size, default="64Gi", help="memory of each pod, with its /dev/shm; default: 64Gi")
    k8s.add_argument("--image", required=True, help="container image with Headrace and its extras")
    k8s.add_argument(
        "--claim", required=True, metavar="NAME", help="PersistentVolumeClaim that all pods can write (ReadWriteMany)"
    )
    k8s.add_argument(
        "--mount", default="/work", metavar="PATH", help="absolute path of the volume in the pods; default: /work"
    )


def _add(
    kinds: Any, name: str, command: Callable[[argparse.Namespace], int], what: str, out: str
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}, and show it.")
    config_and_overrides(parser)
    parser.add_argument("--nodes", type=_count, required=True, metavar="N", help="number of nodes")
    parser.add_argument("--gpus-per-node", type=_count, default=0, metavar="G", help="GPUs of each node; default: none")
    parser.add_argument("--out", type=path, default=Path(out), metavar="FILE", help=f"default: {out}")
    parser.add_argument("--submit", action="store_true", help="also start the job")
    parser.set_defaults(command=command)
    return parser


def _of_form(form: str, expected: str) -> Callable[[str], str]:
    """Return the check of an option that the scheduler would refuse only later. form: regular expression."""

    def checked(text: str) -> str:
        if not re.fullmatch(form, text):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return text

    return checked


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number")
    return int(text)


def _slurm(arguments: argparse.Namespace) -> int:
    from ..trainers.jobs.slurm_job import MARK, SlurmJob

    config = _loaded(arguments)
    run_dir = os.path.abspath(config.run.dir)
    named = {"partition": arguments.partition, "account": arguments.account, "time": arguments.time}
    given = [*(word for word in arguments.overrides if not _sets(word, "run.dir")), f"run.dir={run_dir}"]
    job = SlurmJob(
        name=config.run.name,
        train=["headrace", _verb(config), os.path.abspath(arguments.config), *given],
        run_dir=run_dir,
        folder=os.getcwd(),
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        cpus=arguments.cpus_per_node,
        start_timeout_s=config.resources.start_timeout_s,
        programs="" if arguments.container else os.path.dirname(sys.executable),
        container=arguments.container,
        options=[*(f"--{key}={value}" for key, value in named.items() if value), *arguments.sbatch],
    )
    return _finish(arguments, job.script(), MARK, ["sbatch", str(arguments.out)])


def _k8s(arguments: argparse.Namespace) -> int:
    from ..trainers.jobs.ray_job import MARK, RayJob

    if not os.path.isabs(arguments.mount):
        raise UserError(f"--mount: got {arguments.mount!r}, expected an absolute path, such as /work")
    config = _loaded(arguments)
    run_dir = os.path.normpath(os.path.join(arguments.mount, config.run.dir))
    if not run_dir.startswith(arguments.mount.rstrip("/") + "/"):
        raise UserError(
            f"run.dir: got {config.run.dir!r}, expected a folder in --mount {arguments.mount}, the shared volume"
        )
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-") or "headrace"
    job = RayJob(
        # KubeRay accepts at most 47 characters, the first one a letter.
        name=(name if name[0].isalpha() else f"run-{name}")[:47].rstrip("-"),
        config=Path(arguments.config).read_text(encoding="utf-8"),
        command=_verb(config),
        overrides=[word for word in arguments.overrides if not _sets(word, "run.dir")],
        run_dir=run_dir,
        image=arguments.image,
        ray_version=version("ray"),
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        cpus=arguments.cpus_per_node,
        memory=arguments.memory,
        claim=arguments.claim,
        mount=arguments.mount,
        capacity_mib=config.dataplane.store.capacity_mib,
        launch=secrets.token_hex(4),
        rows_in_ray=config.dataplane.store.kind == "ray",
    )
    return _finish(arguments, job.manifest(), MARK, ["kubectl", "apply", "-f", str(arguments.out)])


def _loaded(arguments: argparse.Namespace) -> Any:
    """Return the configuration. Raises UserError if it names no run folder, in which a job that starts again finds its
    checkpoints, or names a Ray, which the job starts itself."""
    from ..trainers.config.load import load_config, read_sections

    # The job has a Ray to join, on which some keys depend.
    config = load_config(arguments.config, [*arguments.overrides, "resources.ray_address=auto"])
    address = (read_sections(arguments.config, arguments.overrides).get("resources") or {}).get("ray_address")
    if config.run.dir is None:
        raise UserError(
            "run.dir: not set, expected a folder that all hosts share, in which the job finds its run again"
        )
    if address is not None:
        raise UserError(
            f"resources.ray_address: got {address!r}, expected no value, because the job starts a Ray of its own"
        )
    return config


def _verb(config: Any) -> str:
    return "sft" if config.sft.train else "train"


def _sets(override: str, key: str) -> bool:
    return override.partition("=")[0].strip() == key


def _finish(arguments: argparse.Namespace, text: str, mark: str, submit: list[str]) -> int:
    """Write the job and show it, and start it if that is asked for. Another file of the same name is kept."""
    out: Path = arguments.out
    if out.exists() and not (out.is_file() and mark in out.read_text(errors="replace")[:200]):
        raise UserError(f"--out: {out} exists and is not a job that this command wrote, expected a new name")
    if arguments.submit and shutil.which(submit[0]) is None:
        raise UserError(
            f"--submit: the program {submit[0]} is not on the PATH, expected it; without --submit, the "
            "job is only written"
        )
    out.write_text(text, encoding="utf-8")
    print(text)
    if not arguments.submit:
        print(f"written: {out}; start it: {' '.join(submit)}", file=sys.stderr)
        return DONE
    return DONE if subprocess.run(submit).returncode == 0 else FAILED
