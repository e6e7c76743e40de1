"""Wraps Mooncake's client and adds time limits, pooled buffers, errors that name the master, and fixed settings.

No other module imports mooncake. A client that lends no memory to the store (no segment) holds no rows, so no rows are
lost when its process ends.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...codecs.integers import ALIGN, round_up
from ..errors import CapacityExceeded, DataPlaneError, IntegrityError, RowsCleared, StoreLost
from ..listen_address import join_host
from ..rpc.forks import renew_in_forks
from .deadline import DeadlineThreads, unanswered

MIN_BYTES = 1 << 20
KEEP_BYTES = 256 << 20
"""Limit on the bytes in idle buffers. When a new buffer has to be made, idle ones beyond this limit are freed."""


class _Memory:
    """Holds one buffer of the pool: the raw array, and the aligned range within it."""

    __slots__ = ("raw", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.raw = np.empty(nbytes + ALIGN, np.uint8)
        self.address = round_up(self.raw.ctypes.data, ALIGN)
        self.nbytes = nbytes


class _Loan:
    """Base object of all arrays that share one lent buffer. When the last of them is gone, it is garbage-collected and
    returns the buffer to the pool."""

    __slots__ = ("_pool", "_memory", "__array_interface__")

    def __init__(self, pool: StagingPool, memory: _Memory, nbytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._give(self._memory)


class StagingPool:
    """Lends buffers in a few sizes, at most a quarter (or 1 MiB) larger than requested.

    It is thread-safe through deques instead of locks, because the garbage collector may return a buffer at any time,
    even in a thread that holds a lock.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """Keep the library's functions. register, unregister: functions of the transfer library, `register(address,
        nbytes)` and `unregister(address)`."""
        self._register = register
        self._unregister = unregister
        self._idle: defaultdict[int, deque[_Memory]] = defaultdict(deque)

    def take(self, nbytes: int) -> np.ndarray:
        """Lend an uninitialised uint8 array `[nbytes]` at a multiple of ALIGN. The buffer returns to the pool when the
        last view of it is gone."""
        step = max(MIN_BYTES, (1 << nbytes.bit_length()) // 8)
        size = max(step, round_up(nbytes, step))
        try:
            memory = self._idle[size].pop()
        except IndexError:
            self._trim()
            memory = _Memory(size)
            self._register(memory.address, memory.nbytes)
        return np.asarray(_Loan(self, memory, nbytes))

    def idle_bytes(self) -> int:
        """Return the number of bytes in unused buffers."""
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def _give(self, memory: _Memory) -> None:
        self._idle[memory.nbytes].append(memory)

    def _trim(self) -> None:
        for size in sorted(self._idle, reverse=True):
            while self.idle_bytes() > KEEP_BYTES and self._idle[size]:
                self._unregister(self._idle[size].popleft().address)


_logger = logging.getLogger(__name__)

HOW_TO_GET_IT = "pip install -e '.[mooncake]' and apt-get install libibverbs1"
CONNECT_TIMEOUT_S = 30.0
_FORKED = (
    "this process was forked from one that uses Mooncake, whose library does not work after a fork; start it with the "
    "method `spawn` of multiprocessing, and connect there"
)
_loaded_by: dict[str, int] = {}
"""Process id, as `pid`, of the process that has loaded the library."""
INFINIBAND = Path("/sys/class/infiniband")

NOT_FOUND = -704
UNFINISHED = -703
"""Mooncake's error code for a block whose writer has not finished its put."""
_NO_ROOM = -200
_INVALID = -600
_WORDS = {UNFINISHED: "not written to its end", -800: "transfer failed", -900: "RPC failed", -901: "RPC timed out"}

# Every process that joins sets these variables. Otherwise a value from its shell could make a run read by another path
# than it reports.
_FORCED = {
    "MC_STORE_MEMCPY": "0",  # Otherwise memcpy copies blocks in this process's memory, whatever the protocol.
    "MC_STORE_CLIENT_METRIC": "0",
    # `setup` holds Python's global interpreter lock. With the defaults (30 s and 20 attempts), a master that is stopped
    # at that moment would freeze the process for ten minutes. Attempts are needed only when ports are taken.
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_LOG_LEVEL": "ERROR",  # Errors reach the caller as exceptions; INFO logs 14 lines per client.
}
_CLEARED = (
    "MC_FORCE_TCP",  # This variable would turn rdma into tcp silently.
    "MC_MS_AUTO_DISC",
    "MC_RPC_PROTOCOL",
    "MC_USE_TENT",
    "MC_USE_TEV1",
    "MC_STORE_LOCAL_HOT_CACHE_SIZE",  # This cache would serve blocks that were freed.
    "MC_MIN_RPC_PORT",
    "MC_MAX_RPC_PORT",
    "MC_USE_IPV6",
    "MC_STORE_CLUSTER_ID",
    "MC_METADATA_CLUSTER_ID",
)


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Address and pid of a running Mooncake master."""

    name: str
    pid: int
    host: str
    port: int
    ports: str = ""
    """Range of ports in which the clients listen, as `20000-20999`; "" for any."""

    @property
    def endpoint(self) -> str:
        return join_host(self.host, self.port)

    @property
    def peer(self) -> str:
        """Name of the Mooncake master in error messages, with its pid and address."""
        return f"{self.name} pid={self.pid} {self.endpoint}"


class MooncakeClient:
    """One connection to a Mooncake master, the process that knows where each object is. Thread-safe. Each call returns
    or raises within its `timeout_s`."""

    def __init__(self, master: MasterAddress, protocol: str, device: str, segment_bytes: int = 0) -> None:
        """protocol: `tcp` or `rdma`. device: names of the RDMA devices, comma-separated; "" for all. segment_bytes:
        number of bytes of this process's memory to lend to the store.

        Raises ValueError if mooncake or an RDMA device is missing, and StoreLost if the Mooncake master cannot be
        reached or the client does not start.
        """
        self.master = master
        self._lends = segment_bytes > 0
        self._threads = DeadlineThreads(f"mooncake-{master.name}")
        started = time.monotonic()
        library = _load(protocol, device, master)
        self._lock = threading.Lock()
        self._leaving: threading.Thread | None = None
        self.ended = threading.Event()
        """Event that is set when this client is closed, or when its connection to the Mooncake master breaks, because
        the master has then ended."""
        self._store: Any = library.MooncakeDistributedStore()
        self._watch, own_host = self._connect(started)
        threading.Thread(target=self._watch_master, name="mooncake-watch", daemon=True).start()
        setup = (own_host, "P2PHANDSHAKE", segment_bytes, 0, protocol, device, master.endpoint)
        try:
            code = self._run("connect", lambda: self._store.setup(*setup), CONNECT_TIMEOUT_S)
            if code != 0:
                raise StoreLost(f"mooncake client did not start: {_words(code)}", op="connect", peer=master.peer)
            self._assert_transport(protocol)
        except BaseException:
            self.close()
            raise
        self._config = library.ReplicateConfig()
        self._config.replica_num = 1
        # Without the hard pin, the master evicts objects that it considers cold.
        self._config.with_hard_pin = True
        self.staging = StagingPool(self._register, self._unregister)
        renew_in_forks(self, MooncakeClient._renew)
        name = self._store.get_hostname()
        _logger.info("mooncake client %s: %s, %d bytes lent to %s", name, protocol, segment_bytes, master.peer)

    def _renew(self) -> None:
        """Refuse all calls. Over the parent's connections the library would break the parent."""
        self._lock, self._threads = threading.Lock(), DeadlineThreads("mooncake")
        self._leaving = threading.current_thread()
        self._threads.end(StoreLost(_FORKED))
        self.ended.set()

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], memory: np.ndarray, timeout_s: float
    ) -> None:
        """Write objects to the store, from `addresses` within `memory`, a buffer of `staging`. The store holds all of
        them when this returns.

        Raises CapacityExceeded if the memory lent to Mooncake (the segment) has no room, StoreLost if Mooncake fails,
        and the error of `unanswered` if it does not answer in time.
        """

        def call() -> list[int]:
            assert memory.size >= sum(sizes)  # This closure keeps `memory` alive as long as the library reads it.
            return self._store.batch_put_from(list(keys), list(addresses), list(sizes), self._config)

        started = time.monotonic()
        for key, code in zip(keys, self._run("put", call, timeout_s), strict=True):
            if code == _NO_ROOM:
                text = f"the mooncake segment has no room in one piece for {key}, though its account has"
                raise CapacityExceeded(text, op="put", peer=self.master.peer)
            if code != 0:
                raise self._error("put", key, code, started)

    def get(
        self, keys: Sequence[str], spans: Sequence[Sequence[tuple[int, int, int]]], memory: np.ndarray, timeout_s: float
    ) -> None:
        """Read spans of each object into `memory`, a buffer of `staging`. A span is `(source offset, nbytes,
        destination offset)`.

        Raises RowsCleared for an object that is not there, IntegrityError for one that is too short, StoreLost when
        Mooncake fails, and the error of `unanswered` when it does not answer in time.
        """

        def call() -> list[list[list[int]]]:
            return self._store.get_into_ranges(
                [memory.ctypes.data],
                [list(keys)],
                [[[to for _, _, to in object_spans] for object_spans in spans]],
                [[[source for source, _, _ in object_spans] for object_spans in spans]],
                [[[nbytes for _, nbytes, _ in object_spans] for object_spans in spans]],
            )

        started = time.monotonic()
        (found,) = self._run("get", call, timeout_s)
        for key, object_spans, codes in zip(keys, spans, found, strict=True):
            for (source, nbytes, _), code in zip(object_spans, codes, strict=True):
                if code == _INVALID or 0 <= code != nbytes:
                    text = f"{key} does not hold the {nbytes} bytes from {source} that it should"
                    raise IntegrityError(text, op="get", peer=self.master.peer)
                if code < 0:
                    raise self._error("get", key, code, started)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        """Return for each object whether it is in the store and complete. Raises StoreLost when Mooncake fails, and the
        error of `unanswered` when it does not answer in time."""
        started = time.monotonic()
        codes = self._run("get", lambda: self._store.batch_is_exist(list(keys)), timeout_s)
        for key, code in zip(keys, codes, strict=True):
            if code < 0:
                raise self._error("get", key, code, started)
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        """Delete objects, even while others read them. Returns 0, NOT_FOUND or UNFINISHED for each. Raises StoreLost
        for any other result, and the error of `unanswered` if Mooncake does not answer in time."""
        started = time.monotonic()
        codes = self._run("clear", lambda: self._store.batch_remove(list(keys), True), timeout_s)
        for key, code in zip(keys, codes, strict=True):
            if code not in (0, NOT_FOUND, UNFINISHED):
                raise self._error("clear", key, code, started)
        return codes

    def close(self) -> None:
        """Disconnect from the Mooncake master in a background thread, which withdraws the memory that this client lent.
        Idempotent.

        Mooncake's library holds Python's global interpreter lock for one or two seconds while it disconnects.
        """
        self._leave(StoreLost("this client is closed", op="connect", peer=self.master.peer), lost=False)

    # ---------------- The methods below are private.

    def _run(self, op: str, call: Any, timeout_s: float) -> Any:
        started = time.monotonic()
        try:
            return self._threads.run(call, timeout_s)
        except TimeoutError:
            raise unanswered("mooncake", op, self.master.peer, started) from None
        except StoreLost as error:
            elapsed = time.monotonic() - started
            raise StoreLost(error.message, op=op, peer=self.master.peer, elapsed_s=elapsed) from None

    def _connect(self, started: float) -> tuple[socket.socket, str]:
        """Return a connection to the Mooncake master, and the address of this host by which the master is reached."""
        try:
            watch = socket.create_connection((self.master.host, self.master.port), timeout=CONNECT_TIMEOUT_S)
            own_host = watch.getsockname()[0]
        except OSError as error:
            elapsed = time.monotonic() - started
            text = f"mooncake master is lost: {error.strerror or error}"
            raise StoreLost(text, op="connect", peer=self.master.peer, elapsed_s=elapsed) from None
        watch.settimeout(None)
        return watch, own_host

    def _watch_master(self) -> None:
        """Wait on an otherwise unused connection to the Mooncake master until it breaks, then make all calls fail. The
        end of the master is thus noticed at once, instead of after the library's retries."""
        try:
            self._watch.recv(1)
        except OSError:
            pass  # A reset also means that the connection has ended.
        self._leave(StoreLost("mooncake master is lost: connection broke", peer=self.master.peer), lost=True)

    def _leave(self, error: StoreLost, *, lost: bool) -> None:
        """Make all calls raise `error`, then end the library's client. It would otherwise keep calling a dead Mooncake
        master forever."""
        with self._lock:
            if self._leaving is None:
                self._threads.end(error)
                # A thread that returns from the library after Python's shutdown would abort the process. This thread is
                # therefore a daemon only if a call is stuck in the library. The library's client must not be removed
                # then.
                stuck = not self._threads.wait_idle(0.0)
                self._leaving = threading.Thread(
                    target=self._end_library, args=(lost,), name="mooncake-leave", daemon=stuck
                )
                self._leaving.start()
                self.ended.set()

    def _end_library(self, lost: bool) -> None:
        self._threads.wait_idle(None)
        if not (lost and self._lends):
            # Closing would otherwise spend 20 s, under the global interpreter lock, on reporting to the dead master
            # that the memory is withdrawn. The process that lends the memory ends at once (`mooncake_processes.py`).
            self._store.close()
        try:
            self._watch.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The master has closed the connection.
        self._watch.close()

    def _register(self, address: int, nbytes: int) -> None:
        code = self._run("connect", lambda: self._store.register_buffer(address, nbytes), CONNECT_TIMEOUT_S)
        if code != 0:
            text = f"mooncake cannot register a buffer of {nbytes} bytes: {_words(code)}"
            raise StoreLost(text, op="connect", peer=self.master.peer)

    def _unregister(self, address: int) -> None:
        self._run("connect", lambda: self._store.unregister_buffer(address), CONNECT_TIMEOUT_S)

    def _assert_transport(self, protocol: str) -> None:
        devices = [link for link in _open_files() if link.startswith("/dev/infiniband/")]
        if protocol == "rdma" and not devices:
            raise ValueError("dataplane.store.protocol='rdma': mooncake opened no RDMA device; use protocol: tcp")

    def _error(self, op: str, key: str, code: int, started: float) -> DataPlaneError:
        elapsed = time.monotonic() - started
        if code == NOT_FOUND:
            return RowsCleared(f"block {key} was freed", op=op, peer=self.master.peer, elapsed_s=elapsed)
        return StoreLost(f"mooncake failed on {key}: {_words(code)}", op=op, peer=self.master.peer, elapsed_s=elapsed)


def _load(protocol: str, device: str, master: MasterAddress) -> Any:
    """Import `mooncake.store` after setting its options in this process's environment. Raises ValueError when mooncake
    or the RDMA device is missing."""
    if protocol == "rdma":
        present = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
        absent = [name for name in device.split(",") if name and name not in present]
        if absent or not present:
            has = f"has {', '.join(present)}" if present else "has no RDMA device"
            raise ValueError(f"dataplane.store.protocol='rdma' device={device!r}: this host {has}; use protocol: tcp")
    if _loaded_by.setdefault("pid", os.getpid()) != os.getpid():
        raise StoreLost(_FORKED, op="connect", peer=master.peer)
    for name in _CLEARED:
        os.environ.pop(name, None)
    os.environ.update(_FORCED)
    if master.ports:
        os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = master.ports.split("-")
    if ":" in master.host:
        os.environ["MC_USE_IPV6"] = "1"
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ValueError(f"dataplane.store.kind='mooncake': {error}; {HOW_TO_GET_IT}") from None


def _open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # The file descriptor was closed in the meantime.
    return links


def _words(code: int) -> str:
    return f"{_WORDS[code]} (mooncake error {code})" if code in _WORDS else f"mooncake error {code}"
