"""Runs the contenders of the workload with pictures in turns, and summarises their times and bytes."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ray

from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import open_data_plane
from .baselines import TransferQueueContender
from .byte_baselines import TcpServer
from .pictures import (
    QUEUE_KEYS,
    QUEUE_ROWS,
    RANKS,
    RAW,
    RAY,
    TOGETHER_BYTES,
    UNSHARED,
    VLM,
    OwnEndpoint,
    PictureEndpoint,
    PictureSpec,
    QueueEndpoint,
    RawEndpoint,
    RayEndpoint,
)
from .processes import PRODUCER, PoolHost, ProcessLost, ProcessPool, Span, call, consumer
from .results import Result
from .rounds import Keep

_logger = logging.getLogger(__name__)

OPS = ("put", "get", "step")
SLACK_MIB = 64
_runs = itertools.count()


@dataclass(slots=True)
class PictureCase:
    """The measurement of one contender."""

    name: str
    factory: Callable[[], PictureEndpoint]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {op: [] for op in OPS})
    wire_bytes: int = 0
    failure: str = ""
    note: str = ""
    """Remark for the readers of the times."""
    joined: bool = False
    """True if the processes have endpoints of the contender."""


def measure_pictures(
    pool: ProcessPool,
    spec: PictureSpec,
    stores: Sequence[str],
    baselines: Collection[str],
    repeats: int,
    in_process: bool,
    tell: Callable[[str], None],
    keep: Keep,
) -> None:
    """Measure the stores with pictures that are stored once and with pixels in each row, and the baselines.

    baselines: those of `transferqueue`, `ray` and `tcp` that are measured. in_process: whether the stores run in this
    process. Every byte of a first, untimed step is compared. keep: function that gets the results of contenders as soon
    as they are measured, also those of the rounds before an interruption.
    """
    names = [kind + suffix for kind in stores for suffix in ("", UNSHARED)]
    names += [QUEUE_KEYS, QUEUE_ROWS] if "transferqueue" in baselines else []
    names += [RAY] if "ray" in baselines else []
    names += RAW if "tcp" in baselines else []
    once = spec.prompts * spec.picture_bytes + call(pool, PRODUCER, "text_bytes", spec)
    large = spec.row_bytes > TOGETHER_BYTES  # Ray keeps what its readers have read in memory.
    apart = [name for name in names if large and (_is_per_row(name) or name == RAY)]
    for together in [[name for name in names if name not in apart], *([name] for name in apart)]:
        cases: list[PictureCase] = []
        try:
            _measure(pool, spec, together, repeats, in_process, tell, cases)
        finally:
            keep([result for case in cases for result in _results(case, spec, once)])


def _results(case: PictureCase, spec: PictureSpec, once_bytes: int) -> list[Result]:
    """Return the results of one contender; none if it was interrupted before its first round."""
    if case.failure:
        return [Result(VLM, "all", case.name, 0, (), case.failure)]
    nbytes = once_bytes + (spec.row_bytes - spec.prompts * spec.picture_bytes if _is_per_row(case.name) else 0)
    return [
        Result(
            VLM, op, case.name, nbytes, tuple(seconds), wire_bytes=case.wire_bytes if op == "put" else 0, note=case.note
        )
        for op, seconds in case.seconds.items()
        if seconds
    ]  # fmt: skip


def picture_summary(results: Sequence[Result], stores: Sequence[str]) -> dict[str, float]:
    """Return the ratios of times, and of the bytes that a put writes to those of the text and of each picture once.

    TransferQueue counts with the quicker of its two ways for each operation.
    """
    median = {(one.op, one.contender): one.median_s for one in results if one.seconds}
    summary: dict[str, float] = {}
    for kind in stores:
        rivals = {"transferqueue": (QUEUE_KEYS, QUEUE_ROWS), "ray": (RAY,), "unshared": (kind + UNSHARED,)}
        for op in OPS:
            for rival, names in rivals.items():
                times = [median[op, name] for name in names if (op, name) in median]
                if times and (op, kind) in median:
                    summary[f"{VLM}.{op}.{kind}.vs_{rival}"] = min(times) / median[op, kind]
    over = [one.wire_bytes / one.nbytes for one in results if one.contender in stores and one.wire_bytes]
    return summary | ({f"{VLM}.put_bytes_over_once": max(over)} if over else {})


def _is_per_row(name: str) -> bool:
    return name == QUEUE_ROWS or name.endswith(UNSHARED)


def _measure(
    pool: ProcessPool,
    spec: PictureSpec,
    names: Sequence[str],
    repeats: int,
    in_process: bool,
    tell: Callable[[str], None],
    cases: list[PictureCase],
) -> None:
    """Measure contenders in turns. Their cases are added to `cases` before."""
    with ExitStack() as stack:
        queue: list[Any] = []
        cases += [PictureCase(name, _opened(stack, pool, name, spec, queue, in_process)) for name in names]
        stack.callback(_leave, pool)
        for case in cases:
            tell(f"{VLM}/{case.name}: warm-up and verification")
            _attempt(pool, case, cases, lambda case=case: _first(pool, case, spec))
        for number in range(repeats):
            tell(f"{VLM}: round {number + 1} of {repeats}")
            for case in cases:
                _attempt(pool, case, cases, lambda case=case: _step(pool, case, spec, verify=False))
        for case in cases:
            case.note = _spilled() if case.name == RAY else ""


def _spilled() -> str:
    """Say how many bytes Ray has moved to the disk because its object store was full; "" if none."""
    from ray._private.internal_api import memory_summary  # Ray has no public function for it.

    if not ray.is_initialized():
        return ""
    told = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Spilled \d+ MiB", told)
    return f"Ray's object store was full, and moved objects to the disk: {found[0]}" if found else ""


def _leave(pool: ProcessPool) -> None:
    """Close the endpoints of all processes. Processes of which one was lost are replaced."""
    try:
        pool.gather([pool.start(name, "leave") for name in pool.names])
    except ProcessLost:
        pool.restart()


def _opened(
    stack: ExitStack, pool: ProcessPool, name: str, spec: PictureSpec, queue: list[Any], in_process: bool
) -> Callable[[], PictureEndpoint]:
    """Start a contender, and return the function that makes its endpoint in a process. queue: TransferQueue, once it is
    started."""
    if name == RAY:
        return RayEndpoint
    if name in RAW:
        host = PoolHost(pool)
        address = host.serve(name, functools.partial(TcpServer, buffer_bytes=RAW[name]))
        stack.callback(host.stop, name)
        return functools.partial(RawEndpoint, address, RAW[name])
    if name in (QUEUE_KEYS, QUEUE_ROWS):
        if not queue:
            queue.append(TransferQueueContender())
            stack.callback(queue[0].close)
        return functools.partial(QueueEndpoint, name == QUEUE_KEYS)
    kind, shared = name.removesuffix(UNSHARED), not name.endswith(UNSHARED)
    stored = spec.prompts * spec.picture_bytes if shared else spec.row_bytes
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 2 * (stored >> 20) + SLACK_MIB})
    config = DataPlaneConfig(store=store, trusted_network=True, integrity="off", timeout_s=60.0)
    plane = open_data_plane(config, in_process=in_process)
    stack.callback(plane.close)
    handle = plane.handle.over_sockets() if kind == "tcp" else plane.handle
    return functools.partial(OwnEndpoint, handle, shared)


def _attempt(pool: ProcessPool, case: PictureCase, cases: Sequence[PictureCase], run: Callable[[], None]) -> None:
    if case.failure:
        return
    try:
        run()
    except (DataPlaneError, ValueError, RuntimeError, OSError, TimeoutError, ProcessLost) as error:
        case.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        _logger.warning("%s failed", case.name, exc_info=True)
        if isinstance(error, ProcessLost):
            # A process may be stuck in the failed contender's call, so the others get new processes.
            pool.restart()
            for other in cases:
                if other.joined:
                    _attempt(pool, other, (), lambda other=other: _join(pool, other))


def _join(pool: ProcessPool, case: PictureCase) -> None:
    case.joined = True
    for name in (PRODUCER, *map(consumer, range(RANKS))):
        call(pool, name, "join", case.name, case.factory)


def _first(pool: ProcessPool, case: PictureCase, spec: PictureSpec) -> None:
    _join(pool, case)
    _step(pool, case, spec, verify=True)
    case.wire_bytes = call(pool, PRODUCER, "bytes_put", case.name)
    case.seconds = {op: [] for op in OPS}


def _step(pool: ProcessPool, case: PictureCase, spec: PictureSpec, *, verify: bool) -> None:
    """Run one step, and record the seconds of its put, of its reads, and of all stages."""
    ranks = range(RANKS)
    expected = [call(pool, PRODUCER, "digests", spec, rank) if verify else None for rank in ranks]
    lengths = [call(pool, PRODUCER, "lengths", spec, rank) for rank in ranks]
    token, put = call(pool, PRODUCER, "put", case.name, spec, f"r{next(_runs)}")
    reads = [pool.start(consumer(rank), "get", case.name, token, spec, rank, expected[rank]) for rank in ranks]
    get = _stage(pool.gather(reads))
    writes = [pool.start(consumer(rank), "write", case.name, token, spec, rank, lengths[rank]) for rank in ranks]
    write = _stage(pool.gather(writes))
    clear: Span = call(pool, PRODUCER, "clear", case.name, token, spec)
    for op, seconds in zip(OPS, (put.seconds, get, put.seconds + get + write + clear.seconds), strict=True):
        case.seconds[op].append(seconds)


def _stage(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)
