"""Processes that tests share or start cheaply: one Ray cluster, and multiprocessing's fork server with torch. The
cluster's workers are forked.

Importing torch and the model classes takes 4 seconds of a core. Both fork servers do it once in each test process; a
process that they fork starts within 50 ms.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.dataplane.owned_folder import process_start

from . import forks

FORKSERVER = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "headrace.actors.train.reader",
    "headrace.actors.weight_sync.inbox",
    "headrace.codecs.weights.buckets",
]
if not Path("/dev/nvidiactl").exists():  # importing Megatron touches a GPU, and no forked process could use it then
    _PRELOADED += [
        "headrace.tests.trainers.backends.backend_ranks",
        "headrace.trainers.backends.megatron.backend",  # left out where Megatron is not installed
    ]
FORKSERVER.set_forkserver_preload(_PRELOADED)


def suspend(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped. On a busy machine other threads than the one that
    takes the signal can run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + 10
    while any(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def kill(pid: int) -> None:
    """End a process by SIGKILL, and wait until it has ended. A signal takes effect a moment after it was sent."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.001)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended (a zombie has) with all its threads, so that its files are closed, too."""
    return process_start(pid) is None


def zombie_with_a_thread() -> subprocess.Popen[str]:
    """Start a process of which only a thread is left, until it reads a line or the end of its input. Such a process is
    a zombie, as one is whose main thread is the first to die of a signal."""
    code = (
        "import ctypes, os, sys, threading\n"
        "threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(0))).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the main thread does not end"
        time.sleep(0.001)
    return child


def start_ray(num_gpus: int | None = None, num_cpus: int = 16) -> None:
    """Start this process's Ray cluster unless it is there. Its CPUs are a number only, enough for the actors of a run
    that joins it. num_gpus: so many logical GPUs; None for those of the machine."""
    import ray  # GPU tests run where there is none

    if ray.is_initialized():
        return
    fork_ray_workers()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns about its coming default otherwise
    from headrace.trainers.cluster.ray_cluster import lean_start

    with lean_start():
        # `local`: a test beside this one may have a cluster that was started by `ray start`, which Ray would join.
        ray.init(
            "local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, logging_level=logging.WARNING,
            log_to_driver=False,
        )  # fmt: skip


def fork_ray_workers() -> None:
    """Have the workers of every Ray that this process starts from now on forked."""
    from ray._private import ray_constants

    forks.start_server()
    ray_constants.SETUP_WORKER_FILENAME = forks.__file__


def ray_address() -> str:
    """The address at which other processes join this process's Ray cluster, which is started unless it is there."""
    import ray

    start_ray()
    return ray.get_runtime_context().gcs_address


def end_ray() -> None:
    """End it, also before a test that starts a Ray of its own in this process. Idempotent."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
