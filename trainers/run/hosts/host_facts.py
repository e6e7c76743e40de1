"""Collects facts about the host on which it runs, for the comparison of all hosts of a run.

Ray sends the code of this module to the hosts, because a host can lack Headrace or have another version of it. So the
module imports only the standard library at its top.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "ray", "vllm")
"""Packages whose versions must be the same on all hosts that have them."""
PARTS = ("codecs", "dataplane", "actors", "trainers")
"""Folders of Headrace whose code must be the same on all hosts."""
SETTINGS = ("NCCL_", "GLOO_", "VLLM_", "HF_", "TORCH_", "RAY_AUTH_MODE")
"""Beginnings of the environment variables that are compared."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of the names of variables whose values are not sent."""
NO_NAME = "the module there has no"
"""Beginning of the error of a module without the name that is imported."""
TRANSFER_TIMEOUT_S = 60.0
CHUNK = bytes(1 << 20)


class HostProbe:
    """Ray actor that looks at its host, and sends bytes to another one."""

    def facts(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the facts about this host, by the names of the fields of `HostFacts`. question: the driver's `folder`,
        the `node` of this host, the marked folders `shared`, and what must be here."""
        enters = os.path.isdir(question["folder"])
        if enters:
            os.chdir(question["folder"])
        shared = question["shared"].items()
        return {
            "has_folder": enters,
            "shared": {key: _see(Path(folder), question["node"]) for key, folder in shared},
            "absent_paths": [path for path in question["paths"] if not os.path.exists(os.path.expanduser(path))],
            "modules": {path: _import_error(path) for path in question["modules"]},
            "absent_packages": [name for name in question["needs"] if not _is_installed(name)],
            "network": _network_errors(question["interface"], question["ports"], question["num_ports"]),
            "key_file": _key_error(*question["key_file"]),
            **own_facts(),
        }

    def clock(self) -> float:
        """Return the time of this host's clock."""
        return time.time()

    def receive(self, address: str, nbytes: int) -> int:
        """Listen for one sender, and drop what it sends. Returns the port."""
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.settimeout(TRANSFER_TIMEOUT_S)
        threading.Thread(target=_drop, args=(listener, nbytes), daemon=True).start()
        return listener.getsockname()[1]

    def send(self, address: str, port: int, nbytes: int) -> float | str:
        """Send bytes to a receiver, and return the seconds until it has all of them, or the reason of a failure."""
        try:
            with socket.create_connection((address, port), TRANSFER_TIMEOUT_S) as connection:
                began = time.perf_counter()
                for _ in range(nbytes // len(CHUNK)):
                    connection.sendall(CHUNK)
                return time.perf_counter() - began if connection.recv(1) else "the receiver closed the connection"
        except OSError as error:
            return error.strerror or str(error)

    def reduce(self, backend: str, meeting: str, address: str, rank: int, world: int, nbytes: int) -> float | str:
        """Sum numbers over all ranks, and return the seconds, or the reason of a failure. meeting: URL at which the
        ranks find each other. address: that of this host."""
        torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
        for name, entries in importlib.import_module("psutil").net_if_addrs().items():
            if any(entry.address == address for entry in entries):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # Its own choice can be a loopback address.
        try:
            dist.init_process_group(backend, meeting, datetime.timedelta(seconds=TRANSFER_TIMEOUT_S), world, rank)
            numbers = torch.ones(nbytes // 4, device="cuda" if backend == "nccl" else "cpu")
            dist.all_reduce(numbers[:1])  # The first operation makes the connections.
            began = time.perf_counter()
            dist.all_reduce(numbers)
            total = numbers[-1].item()  # It waits for the GPU.
            took = time.perf_counter() - began
            dist.destroy_process_group()
        except Exception as error:  # Each backend has its own errors.
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return took if total == world else f"the sum is {total:g}, expected {world}"


def own_facts() -> dict[str, Any]:
    """Return the facts about this process's host and environment for which nothing needs to be asked."""
    name, shm = socket.gethostname(), Path("/dev/shm")
    mask = os.umask(0o077)  # The system has no call that only reads it.
    os.umask(mask)
    settings = {key: value for key, value in os.environ.items() if key.startswith(SETTINGS)}
    return {
        "resolves": _succeeds(socket.getaddrinfo, name, None) == "",
        "versions": {"Python": ".".join(platform.python_version_tuple()[:2]), **_versions()},
        "user": os.getuid(),
        "umask": f"{mask:04o}",
        "shm_bytes": shutil.disk_usage(shm).free if shm.is_dir() else 0,
        "temporary": _succeeds(_write_temporary),
        "settings": {key: "set" if any(part in key for part in SECRETS) else settings[key] for key in settings},
        "num_gpus": _num_gpus(),
    }


def _succeeds(function: Any, *arguments: Any) -> str:
    """Return the system's error of a call, or "" if it succeeds."""
    try:
        function(*arguments)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _write_temporary() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(CHUNK)


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed. That of Headrace has a digest of its code."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # A build for CUDA and one for CPUs are the same version.
            found[package] = importlib.metadata.version(package).partition("+")[0]
    with contextlib.suppress(ImportError):
        version = importlib.import_module("headrace.version")
        root, digest = Path(version.__file__ or "").parent, hashlib.blake2b(digest_size=4)
        for path in sorted(path for part in PARTS for path in (root / part).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
        found["headrace"] = f"{version.__version__} (code {digest.hexdigest()})"
    return found


def _see(folder: Path, node: str) -> str:
    """Return why this host does not share the folder that the driver has marked, or "". A mark is written back."""
    if not os.path.isdir(folder.parent):
        return "does not have"
    if not os.path.isfile(folder / "driver"):
        return "has another folder in place of"
    error = _succeeds((folder / node).write_bytes, CHUNK[: 1 << 16])
    return f"cannot write to ({error})" if error else ""


def _import_error(path: str) -> tuple[str, str]:
    """Return why a `module:name` cannot be used, and the name of the module that is absent; ("", "") if it can."""
    module, _, name = path.partition(":")
    try:
        found = hasattr(importlib.import_module(module), name)
    except BaseException as error:  # A user's module can raise any error at import, also SystemExit.
        absent = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        return f"{type(error).__name__}: {error}", absent
    return ("", "") if found else (f"{NO_NAME} {name!r}", "")


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. An empty folder of its name is not enough."""
    spec = importlib.util.find_spec(package)
    return spec is not None and (spec.origin is not None or any(map(os.listdir, spec.submodule_search_locations or ())))


def _network_errors(interface: str | None, ports: str | None, num_ports: int) -> list[str]:
    """Return a sentence for the interface that this host lacks, or for a range of ports with too few free ones."""
    if interface is None and ports is None:
        return []
    try:
        listening = importlib.import_module("headrace.dataplane.listen_address")
        address = listening.address_of(interface) if interface else listening.ray_address()
        free = listening.PortRange.parse(ports).num_free(address) if ports else num_ports
    except ImportError:  # The comparison of the versions says so.
        return []
    except ValueError as error:
        return [str(error)]
    said = f"resources.ports: got {ports!r} with {free} free at {address}, expected {num_ports} for the run"
    return [said] if free < num_ports else []


def _key_error(path: str = "", expected: str = "") -> str:
    """Return why this host's key in a file is not the expected one, or ""."""
    with contextlib.suppress(ImportError):  # The comparison of the versions says so.
        run_key = importlib.import_module("headrace.dataplane.security.run_key")
        return run_key.key_error(path, expected) if path else ""
    return ""


def _num_gpus() -> int:
    with contextlib.suppress(ImportError):
        return len(importlib.import_module("headrace.actors.process.memory").gpu_sizes())
    return 0


def _drop(listener: socket.socket, nbytes: int) -> None:
    with listener, contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(TRANSFER_TIMEOUT_S)
            while nbytes and (read := len(connection.recv(min(nbytes, len(CHUNK))))):
                nbytes -= read
            connection.sendall(b"\1" if not nbytes else b"")
