"""Connects a run to Ray: joins or starts a cluster, checks its CPUs, and at the end stops a started cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import parameter, services, worker
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._raylet import ClusterID, Config, GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError

from ...actors.process.socket_folder import ray_folder
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.security.ray_certificates import certificate_mistake
from ..config.config import ResourcesConfig
from ..errors import UserError
from .places.placement_plan import PlacementRequest

_log = logging.getLogger(__name__)
MIN_OBJECT_STORE_MIB = 128
"""Size in MiB of the object store that Ray needs for its own objects."""
SETTLE_S = 15.0
"""Seconds within which Ray must register that the CPUs of an ended run are free."""
LOOK_S = 0.25
"""Seconds between two queries to Ray for free CPUs."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds within which a cluster to join must accept a connection."""
QUICK_FAILURE_S = 10.0
"""Seconds within which a start of Ray that fails is not repeated, because it did not fail for lack of time."""


@dataclass(frozen=True, slots=True)
class CpuDemand:
    """The logical CPUs that a run's actors request from Ray: one for each actor, or for each process of an engine."""

    rollout_actors: int
    """Number of rollout actors that embed no engine."""
    engines: int
    """Number of processes of all engines."""
    train_workers: int

    @property
    def cpus(self) -> int:
        """Total number of logical CPUs."""
        return self.rollout_actors + self.engines + self.train_workers

    def __str__(self) -> str:
        parts = {
            "rollout actor": self.rollout_actors,
            "engine process": self.engines,
            "train worker": self.train_workers,
        }
        return " + ".join(f"{count} {name}(s)" for name, count in parts.items() if count)


def object_store_mib(store: StoreConfig) -> int:
    """Return the size of Ray's object store in MiB. It is the size that Ray itself needs, plus the data plane's
    capacity if the data plane stores its rows there."""
    return store.capacity_mib + MIN_OBJECT_STORE_MIB if store.kind == "ray" else MIN_OBJECT_STORE_MIB


AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable with which Ray's processes ask for a token (`token`) or do not (`disabled`)."""
GREETING_S = 2.0
"""Seconds within which Ray's GCS, like every HTTP/2 server, sends its first bytes to a connection."""


def check_token(address: str | None, *, trusted_network: bool) -> None:
    """Raise UserError for a Ray cluster in which any peer on the network can run code, unless the network is trusted.
    address: cluster to join; None for one that will be started here. Raises OSError if `auto` finds no cluster."""
    allow = (
        "or set dataplane.trusted_network=true (headrace pool start --trusted-network) if everyone who reaches its "
        "hosts may do so"
    )
    if trusted_network:
        return
    if address in (None, "local"):
        if os.environ.get(AUTH_MODE, "").lower() == "disabled":
            raise UserError(
                f"{AUTH_MODE}: got 'disabled', expected 'token' or no value, because any peer on the network could "
                f"run code in the run's own Ray; unset it, {allow}"
            )
        return
    found = services.get_ray_address_from_environment(address, None) if address == "auto" else address
    if not asks_for_token(found):
        raise UserError(
            f"dataplane.trusted_network: got false with resources.ray_address={address!r}, expected true, because "
            "that Ray cluster asks for no token and runs code for any peer on the network; start it with "
            f"{AUTH_MODE}=token, {allow}"
        )


def reached(given: str) -> str:
    """Return HOST:PORT of the Ray cluster at `given`, which may be `auto`. Raises UserError if nothing accepts a
    connection there, because Ray itself would try for many minutes and could not be interrupted."""
    try:
        address = given.removeprefix("ray://")
        if given == "auto":
            address = services.get_ray_address_from_environment(given, None)
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError("it does not have the form HOST:PORT")
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
            mistake = certificate_mistake(connection)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"resources.ray_address: got {given!r}, expected the address of a Ray that can be reached ({why})"
        ) from error
    if mistake:
        raise UserError(f"resources.ray_address: got {given!r}: {mistake}")
    return address


def asks_for_token(address: str) -> bool:
    """Return whether Ray's GCS at `address` (HOST:PORT) refuses a request without a token. Also True where no GCS
    answers, because joining it then says what is wrong."""
    address = address.removeprefix("ray://")
    if not _greets(address):
        return True
    before = os.environ.get(AUTH_MODE)
    os.environ[AUTH_MODE] = "disabled"
    Config.initialize("")  # Ray reads the environment.
    try:
        # The cluster's id is wrong, so a GCS without a token refuses the request, too, but for that reason.
        GcsClient(address=address, cluster_id=ClusterID.from_random().hex()).check_alive([], timeout=5)
        return False
    except AuthenticationError as error:
        return "WrongClusterID" not in str(error)
    except Exception:  # Ray's errors have several classes.
        return True
    finally:
        del os.environ[AUTH_MODE]
        if before is not None:
            os.environ[AUTH_MODE] = before
        Config.initialize("")


def _greets(address: str) -> bool:
    """Return whether a server at `address` (HOST:PORT) speaks first, as Ray's GCS does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), GREETING_S) as connection:
            return bool(connection.recv(1))
    except (OSError, ValueError):
        return False


def check_credentials(given: str, address: str) -> None:
    """Raise UserError if the Ray cluster at `address` (HOST:PORT) refuses the token of this process, or misses one.

    The cluster is not joined. given: the address as the user has it.
    """
    if not _greets(address):
        return  # Joining it says what is wrong.
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # A client without a token ends the process.
        GcsClient(address=address).check_alive([], timeout=5)
    except AuthenticationError as error:
        raise _not_joined(given, error) from error
    except RuntimeError:  # Joining it says what is wrong, here too.
        return


def open_cluster(
    resources: ResourcesConfig, request: PlacementRequest, dataplane: DataPlaneConfig, *, check_cpus: bool = True
) -> Cluster:
    """Join the Ray cluster that the configuration names, or start one. Raises UserError if the cluster has too few
    CPUs, unless `check_cpus` is false, or asks for no token on a network that is not trusted."""
    demand = CpuDemand(request.num_actors or 0, request.engine_cpus, request.topology.world)
    return Cluster(
        address=resources.ray_address,
        num_cpus=resources.num_cpus,
        demand=demand if check_cpus or resources.ray_address is None else CpuDemand(0, 0, 0),
        pooled=request.pooled,
        namespace=f"headrace-{uuid.uuid4().hex[:8]}",
        object_store_mib=object_store_mib(dataplane.store) + request.pictures_mib,
        start_timeout_s=resources.start_timeout_s,
        trusted_network=dataplane.trusted_network,
    )


class Cluster:
    """A connection to a Ray cluster that was either joined or started here. `close` disconnects. If the cluster was
    started here, `close` also stops it and waits until its processes have exited."""

    def __init__(
        self,
        *,
        address: str | None,
        num_cpus: int | None,
        demand: CpuDemand,
        namespace: str,
        object_store_mib: int,
        pooled: bool = False,
        start_timeout_s: float = 300.0,
        trusted_network: bool = False,
    ) -> None:
        """address: cluster to join; None starts one with `num_cpus` logical CPUs. demand: CPUs that must be free in a
        joined cluster. pooled: whether engines and train workers use the GPUs of a pool; on a cluster with GPUs they
        then need no CPU. start_timeout_s: seconds within which a new cluster must have started. trusted_network:
        whether the cluster may run code for any peer on the network. Raises UserError if it does and may not, lacks
        CPUs, or has not started in time."""
        if num_cpus is not None and num_cpus < demand.cpus:
            raise UserError(
                f"resources.num_cpus: got {num_cpus}, expected at least {demand.cpus}: {demand} need a logical CPU each"
            )
        if ray.is_initialized():
            raise UserError(
                "resources.ray_address: this process is connected to a Ray already, expected none, because a run "
                "starts or joins a Ray of its own and leaves it at its end; call ray.shutdown() first"
            )
        self.owned = address is None
        with suppress(OSError):  # If no cluster is there, joining it says so.
            check_token(address, trusted_network=trusted_network)
        before = set(psutil.Process().children())
        self._print = worker.print_to_stdstream
        worker.print_to_stdstream = _log_what_ray_says
        quiet = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.owned:
                # Ray's processes read these variables. By default Ray sends usage reports and warns about missing
                # accelerators.
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
                settings = {
                    "num_cpus": num_cpus or max(os.cpu_count() or 1, demand.cpus),
                    "object_store_memory": object_store_mib << 20,
                    **quiet,
                }
                with _own_signal_handlers():
                    _start_ray(settings, start_timeout_s, before)
            else:
                assert address is not None, "a cluster without an address is started here"
                _join_ray(address, quiet)
                on_gpus = pooled and ray.cluster_resources().get("GPU", 0.0) > 0
                self._check(CpuDemand(demand.rollout_actors, 0, 0) if on_gpus else demand)
            self._started = set(psutil.Process().children()) - before if self.owned else set()
            self.num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
        except BaseException:  # An interrupt, too: a notebook goes on after it, and its next run starts a Ray.
            worker.print_to_stdstream = self._print
            with _own_signal_handlers():
                _end_ray(before if self.owned else None)
            raise

    def _check(self, demand: CpuDemand) -> None:
        until_s, free = time.monotonic() + SETTLE_S, ray.available_resources().get("CPU", 0.0)
        # Ray notices late that the driver of an ended run, and with it its actors, are gone.
        while free < demand.cpus <= ray.cluster_resources().get("CPU", 0.0) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            free = ray.available_resources().get("CPU", 0.0)
        if free < demand.cpus:
            raise UserError(
                f"resources.ray_address: that Ray cluster has {free:g} free CPUs, expected at least {demand.cpus}: "
                f"{demand} need a logical CPU each"
            )

    def processes(self) -> set[psutil.Process]:
        """Return the processes of a cluster that was started here, and their descendants. A joined cluster has none."""
        return {process for root in self._started for process in _family(root)}

    def close(self) -> None:
        """Disconnect from Ray. If the cluster was started here, its processes are stopped, and killed if they still run
        after 10 seconds. Idempotent."""
        worker.print_to_stdstream = self._print
        if not ray.is_initialized():
            return
        started = list(self.processes())
        with _own_signal_handlers():
            ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=10)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5)


def _log_what_ray_says(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Write Ray's messages about workers, such as notes about dead processes, to the log instead of the terminal. The
    run itself reports each death in one sentence."""
    _log.info("Ray: %s", " ".join(data["lines"]))


def _start_ray(settings: dict[str, Any], timeout_s: float, before: set[psutil.Process]) -> None:
    """Start Ray. A start that Ray gives up for lack of time is repeated within `timeout_s` seconds.

    before: child processes of this process that are not Ray's. Raises UserError with one sentence if Ray does not
    start.
    """
    began, folder = time.monotonic(), ray_folder()
    while True:
        tried = time.monotonic()
        left_s = timeout_s - (tried - began)
        os.environ["RAY_gcs_server_port_wait_time_s"] = str(max(1, round(left_s)))
        try:
            # A try gets only half of the remaining time, because a Ray process that dies is replaced only by another
            # try.
            with lean_start(left_s / 2):
                ray.init(address="local", include_dashboard=False, _temp_dir=folder, **settings)
            return
        except Exception as error:  # Ray raises a plain Exception when its processes are late.
            _end_ray(before)
            now = time.monotonic()
            if now - tried >= QUICK_FAILURE_S and now - began < timeout_s:
                _log.warning("Ray did not start within %.0f s, and is started again", now - tried)
                continue
            raise UserError(
                f"resources.start_timeout_s: Ray did not start within {now - began:.0f} s of {timeout_s:g} s: this "
                f"machine has load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, and Ray says "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error


def _join_ray(address: str, settings: dict[str, Any]) -> None:
    if address != "local":
        reached(address)
    with _own_signal_handlers():
        try:
            ray.init(address=address, **settings)
        except (ConnectionError, RuntimeError, AuthenticationError) as error:
            raise _not_joined(address, error) from error


def _not_joined(address: str, error: Exception) -> UserError:
    why = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, AuthenticationError):
        why = "it has another token than this host"
    hint = "if it asks for a token, copy its file ~/.ray/auth_token to this host"
    if os.environ.get(AUTH_MODE, "").lower() in ("", "disabled"):
        hint += f", and set {AUTH_MODE}=token"
    return UserError(
        f"resources.ray_address: got {address!r}, expected a Ray cluster that can be joined: {why}; {hint}"
    )


def _end_ray(before: set[psutil.Process] | None) -> None:
    """Disconnect from a Ray that has started in part. before: child processes of this process that are not Ray's, of
    which the others are killed; None for a Ray that was joined."""
    ray.shutdown()
    started = set(psutil.Process().children()) - before if before is not None else set()
    for process in started:
        for member in _family(process):
            with suppress(psutil.NoSuchProcess):
                member.kill()
    psutil.wait_procs(started, timeout=5)


@contextmanager
def lean_start(wait_s: float = 30.0) -> Iterator[None]:
    """Context manager in which a Ray cluster starts without unneeded processes. `ray.init` has no argument for this.

    Ray's dashboard would start for its usage statistics even with `include_dashboard=False`, and `ray.init` would wait
    2 s for it. The autoscaler's monitor has nothing to do in a cluster that does not grow. The agent of a node, which
    Ray needs, takes any free port: with the default port, 52365, a second cluster on the host would wait 3 s for the
    port of the first.

    wait_s: seconds that Ray waits for its new node; its own limit is 30 s.
    """
    node: Any = Node
    parameters, start, get_node = parameter.RayParams, node.start_api_server, services.get_node

    def get_node_patiently(address: str, node_id: str) -> Any:
        until = time.monotonic() + wait_s
        while True:
            try:
                return get_node(address, node_id)
            except RuntimeError:  # The node is not registered yet.
                if time.monotonic() >= until:
                    raise
                time.sleep(0.05)

    parameter.RayParams = partial(parameters, dashboard_agent_listen_port=0, no_monitor=True)
    node.start_api_server = _start_no_api_server
    services.get_node = get_node_patiently
    try:
        yield
    finally:
        parameter.RayParams, node.start_api_server, services.get_node = parameters, start, get_node


def _start_no_api_server(node: Any, **_: Any) -> None:
    node._webui_url = ""


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Context manager that restores the handlers of SIGTERM and SIGINT at its end. A no-op outside the main thread. Ray
    installs its own handlers in Python and in C++, and removes them when it shuts down. With its C++ handler, SIGTERM
    aborts the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # The handler is None if it was not installed from Python.
                signal.signal(number, handler)


def _family(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants; an empty list if the process has ended."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
