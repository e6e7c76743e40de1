"""Writes the manifest with which KubeRay runs a training on a Kubernetes cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from .start_again import RESUME

MARK = "# Written by `headrace launch k8s`"
"""Beginning of a manifest, by which the command knows its own files."""
RETRIES = 3
"""Number of times that KubeRay starts a failed job again, each time with new pods."""
START_TIMEOUT_S = 600
"""Seconds within which all pods must have joined the job's Ray."""
KEPT_S = 600
"""Seconds for which the pods of a finished job remain, for their logs."""
MIB_BESIDE_ROWS = 2048
"""MiB of `/dev/shm` for Ray's own objects, NCCL and weights, in addition to the rows."""
RAY_OBJECTS_MIB = 256
"""MiB of Ray's object store, in addition to rows that are stored there. By default Ray takes 30% of the memory."""
HEAD_CPUS, HEAD_MEMORY = 4, "16Gi"
"""Size of the pod of the driver, which has no GPU and takes no actor."""
CONFIG_FOLDER = "/etc/headrace"
"""Folder of the configuration in each pod."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and not escaped."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass(frozen=True, slots=True)
class RayJob:
    """A training as a job of KubeRay."""

    name: str
    """Name of the job, of letters, digits and `-`."""
    config: str
    """Text of the configuration file."""
    command: str
    """Command of `headrace` that trains: `train` or `sft`."""
    overrides: Sequence[str]
    """Overrides of keys of the configuration."""
    run_dir: str
    """Absolute path of the run folder, which lies in the shared volume."""
    image: str
    """Image with Headrace."""
    ray_version: str
    """Version of Ray in the image."""
    nodes: int
    """Number of pods for engines and train workers."""
    gpus: int
    """Number of GPUs of each of these pods."""
    cpus: int
    """Number of CPUs of each of these pods."""
    memory: str
    """Memory of each of these pods, such as `64Gi`. It includes what `/dev/shm` holds."""
    claim: str
    """Name of a PersistentVolumeClaim that all pods can mount for writing (ReadWriteMany)."""
    mount: str
    """Absolute path of this volume in the pods, the working folder of the run."""
    capacity_mib: int
    """Room for rows on each host, in MiB."""
    launch: str
    """Name of this launch, of letters and digits. A run folder that another launch has begun is left as it is."""
    rows_in_ray: bool
    """Whether rows are stored in Ray's object store."""

    def manifest(self) -> str:
        """Return the text of the manifest."""
        name = f"{self.name}-config"
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"config.yaml": self.config},
        }
        job = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": self.name},
            "spec": {
                "entrypoint": self._entrypoint(),
                "backoffLimit": RETRIES,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": KEPT_S,
                "rayClusterSpec": {
                    "rayVersion": self.ray_version,
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": {
                        "rayStartParams": {"num-cpus": "0", **self._start_params()},
                        "template": self._pod("ray-head", HEAD_CPUS, HEAD_MEMORY, 0, name),
                    },
                    "workerGroupSpecs": [
                        {
                            "groupName": "workers",
                            "replicas": self.nodes,
                            "minReplicas": self.nodes,
                            "maxReplicas": self.nodes,
                            "rayStartParams": {"num-cpus": str(self.cpus), **self._start_params()},
                            "template": self._pod("ray-worker", self.cpus, self.memory, self.gpus, name),
                        }
                    ],
                },
            },
        }
        head = f"{MARK}. Start it with: kubectl apply -f FILE (KubeRay 1.5.1 or newer)\n"
        return head + yaml.dump_all([config, job], Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)

    def _entrypoint(self) -> str:
        """Return the command that runs in the head pod. A repeated job continues its run.

        It is a single command, because KubeRay writes it unquoted into the shell of the pod that submits the job, which
        would run a second command itself."""
        train = [self.command, f"{CONFIG_FOLDER}/config.yaml", *self.overrides, f"run.dir={self.run_dir}"]
        script = (
            f"RUN_DIR={shlex.quote(self.run_dir)}\nJOB=$RUN_DIR/k8s-{self.launch}\n"
            f"cd {shlex.quote(self.mount)} || exit 1\n"
            f"python -m headrace.trainers.jobs.joined_nodes auto {self.nodes + 1} {START_TIMEOUT_S} || exit 1\n"
            f"{RESUME}exec {shlex.join(['headrace', *train, 'resources.ray_address=auto'])} $RESUME\n"
        )
        return shlex.join(["sh", "-c", script])

    def _start_params(self) -> dict[str, str]:
        mib = RAY_OBJECTS_MIB + (self.capacity_mib if self.rows_in_ray else 0)
        return {"object-store-memory": str(mib << 20)}

    def _pod(self, name: str, cpus: int, memory: str, gpus: int, config: str) -> dict[str, Any]:
        sizes = {"cpu": str(cpus), "memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        mounts = {"shm": "/dev/shm", "shared": self.mount, "config": CONFIG_FOLDER}
        volumes = [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{self.capacity_mib + MIB_BESIDE_ROWS}Mi"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "config", "configMap": {"name": config}},
        ]
        container = {
            "name": name,
            "image": self.image,
            "workingDir": self.mount,
            "resources": {"limits": sizes, "requests": dict(sizes)},
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
        }
        return {"spec": {"containers": [container], "volumes": volumes}}
