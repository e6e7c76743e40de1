"""Sets the environment variables that vLLM's processes start with; no other file of the engine touches them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FORCED = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the host has threads (Ray, torch): a forked worker would hang
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it ignores the seeds of single requests
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_ON_CPU = {
    # By default every engine of a host binds its threads to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process for engine and worker instead of two where tp is 1; AsyncLLM starts one in any case.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Even in eager mode vLLM compiles the counting of log-prob ranks, which takes seconds at the first requests.
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def log_level() -> Iterator[None]:
    """Context manager that sets vLLM's log level to errors, unless the user has set a level. Import vLLM inside the
    block, because it reads the level when it is imported."""
    chosen = "VLLM_LOGGING_LEVEL" in os.environ
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        if not chosen:
            del os.environ["VLLM_LOGGING_LEVEL"]


@contextmanager
def engine_environment(*, cpu: bool, tp: int) -> Iterator[None]:
    """Context manager that sets the environment variables that vLLM's processes inherit. It restores this process's own
    when the block ends.

    vLLM itself writes LD_PRELOAD and more into the environment, which every later child process would inherit. The
    states of the random generators of Python, NumPy and torch are restored, too; of the latter two if they have been
    imported, because a process that starts early must not wait for them here.
    """
    before = dict(os.environ)
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy and numpy.random.get_state()
    torch_state = torch and torch.random.get_rng_state()
    os.environ.update(_FORCED)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if cpu:
        os.environ.update(_ON_CPU)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // tp)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if torch:
            torch.random.set_rng_state(torch_state)
