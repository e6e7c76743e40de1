"""A Ray that is started here waits for no port of another Ray on this host, and leaves signals to the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import ray_constants, services
from ray.exceptions import AuthenticationError

from headrace.tests.process_pool import start_ray
from headrace.trainers.cluster import ray_cluster
from headrace.trainers.cluster.ray_cluster import (
    Cluster,
    CpuDemand,
    asks_for_token,
    check_credentials,
    check_token,
    lean_start,
)
from headrace.trainers.errors import UserError


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process leave it connected to their Ray."""
    if "start_ray" not in request.function.__code__.co_names:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.processes
def test_the_agent_takes_any_free_port() -> None:
    start_ray()
    context = ray.get_runtime_context()
    node = services.get_node(context.gcs_address, context.get_node_id())
    assert node["dashboard_agent_listen_port"] not in (0, ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)


def test_signals_are_handled_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes SIGTERM when it begins and leaves it without a handler when it ends."""
    started: list[bool] = []

    def ray_takes_it(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        started.append(True)

    monkeypatch.setattr(ray, "init", ray_takes_it)
    monkeypatch.setattr(ray, "shutdown", ray_takes_it)
    monkeypatch.setattr(ray, "is_initialized", lambda: len(started) % 2 == 1)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "nodes", list)
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    monkeypatch.setattr(ray_cluster, "reached", lambda address: address)
    try:
        for address in (None, "127.0.0.1:1"):
            cluster = Cluster(
                address=address, num_cpus=1, demand=CpuDemand(0, 1, 0), namespace="signals", object_store_mib=128
            )
            os.kill(os.getpid(), signal.SIGTERM)
            cluster.close()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM] * 4 and len(started) == 4


class Clock:
    """Time that passes only while Ray starts."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def start(tries: list[float], monkeypatch: pytest.MonkeyPatch, timeout_s: float = 100.0) -> list[dict[str, Any]]:
    """Start a cluster whose tries take these seconds and fail; one of 0 s succeeds. Returns the arguments of each."""
    clock, calls = Clock(), list[dict[str, Any]]()

    def init(**arguments: Any) -> None:
        calls.append(arguments)
        if seconds := tries[len(calls) - 1]:
            clock.now += seconds
            raise Exception("The current node timed out during startup.\nMore.")  # noqa: TRY002 - as Ray does

    for name in ("shutdown", "nodes"):
        monkeypatch.setattr(ray, name, list)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "time", clock)
    demand = CpuDemand(0, 1, 0)
    Cluster(address=None, num_cpus=1, demand=demand, namespace="n", object_store_mib=128, start_timeout_s=timeout_s)
    return calls


def test_a_late_start_is_repeated_within_the_limit_and_in_a_short_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "d" * 99)
    assert [call["_temp_dir"] for call in start([60.0, 30.0, 0.0], monkeypatch)] == ["/tmp/ray"] * 3


@pytest.mark.parametrize(("tries", "said"), [([60.0, 60.0], "within 120 s of 100 s"), ([2.0], "within 2 s of 100 s")])
def test_a_start_that_fails_is_one_sentence(tries: list[float], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=f"^resources.start_timeout_s: Ray did not start {said}: .* load [0-9]+ on"
    ) as info:
        start(tries, monkeypatch)
    assert "\n" not in str(info.value) and "The current node timed out during startup. More." in str(info.value)


@pytest.mark.processes
def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    ended: list[bool] = []

    def init(**_: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    before = ray_cluster.worker.print_to_stdstream
    with pytest.raises(KeyboardInterrupt):
        Cluster(address=None, num_cpus=1, demand=CpuDemand(0, 1, 0), namespace="n", object_store_mib=128)
    [process] = started
    process.wait(5)
    assert ended == [True] and ray_cluster.worker.print_to_stdstream is before


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node": 1}])

    def get_node(address: str, node_id: str) -> Any:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with lean_start(5.0):
        assert services.get_node("", "") == {"node": 1}
    assert services.get_node is get_node
    answers = iter([RuntimeError("never")])
    with lean_start(0.0), pytest.raises(RuntimeError, match="never"):
        services.get_node("", "")


def test_a_cluster_that_cannot_be_joined_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("Version mismatch:\n  Ray 2.9")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "reached", lambda address: address)
    with pytest.raises(UserError, match=r"^resources.ray_address: got 'h:1', expected .* joined: Version mismatch: R"):
        Cluster(address="h:1", num_cpus=None, demand=CpuDemand(0, 1, 0), namespace="n", object_store_mib=128)


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:1", "Connection refused"), ("somewhere", "it does not have the form HOST:PORT")],
)
def test_an_address_without_a_ray_is_told_at_once(address: str, why: str) -> None:
    """Ray itself tries for many minutes, and no interrupt ends it."""
    with pytest.raises(UserError, match=f"^resources.ray_address: got '{address}', expected .* be reached .{why}"):
        Cluster(address=address, num_cpus=None, demand=CpuDemand(0, 1, 0), namespace="n", object_store_mib=128)


class Gcs:
    """Ray's GCS as its client sees it, which refuses every request for a reason."""

    reason = ""

    def __init__(self, address: str, cluster_id: str) -> None:
        assert os.environ["RAY_AUTH_MODE"] == "disabled", "the request has no token"

    def check_alive(self, nodes: list[Any], timeout: float) -> None:
        raise AuthenticationError(self.reason)


def greet(listener: socket.socket) -> None:
    """Begin the conversation with one client, as an HTTP/2 server does."""
    with listener.accept()[0] as client:
        client.sendall(b"\0")
        client.recv(1)


@pytest.mark.parametrize("reason", ["WrongClusterID", "InvalidAuthToken"])
def test_a_cluster_without_a_token_needs_a_trusted_network(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.5)  # for the TLS that a test's port never answers
    monkeypatch.setattr(ray_cluster, "GcsClient", type("Refuses", (Gcs,), {"reason": reason}))
    monkeypatch.setattr(ray, "init", lambda **settings: joined.append(settings["address"]))
    for name, value in {"available_resources": {"CPU": 8.0}, "nodes": [], "cluster_resources": {}}.items():
        monkeypatch.setattr(ray, name, lambda value=value: value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    demand = CpuDemand(0, 1, 0)
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        threading.Thread(target=greet, args=(gcs,)).start()
        if reason == "WrongClusterID":
            with pytest.raises(UserError, match="^dataplane.trusted_network: got false with resources.ray_address='12"):
                Cluster(address=address, num_cpus=None, demand=demand, namespace="n", object_store_mib=128)
            assert not joined
        Cluster(
            address=address, num_cpus=None, demand=demand, namespace="n", object_store_mib=128,
            trusted_network=reason == "WrongClusterID",
        )  # fmt: skip
    assert joined == [address] and os.environ["RAY_AUTH_MODE"] == "token"


def test_an_own_ray_without_a_token_needs_a_trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match="^RAY_AUTH_MODE: got 'disabled', expected 'token' or no value"):
        start([0.0], monkeypatch)
    check_token(None, trusted_network=True)
    monkeypatch.delenv("RAY_AUTH_MODE")
    check_token(None, trusted_network=False)


@pytest.mark.processes
def test_a_rays_token_is_asked_about_by_a_request_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ray()
    before = os.environ.get("RAY_AUTH_MODE")
    assert asks_for_token(ray.get_runtime_context().gcs_address) is True
    assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote()) == 1, "this process has its token still"
    assert os.environ.get("RAY_AUTH_MODE") == before
    check_credentials("auto", ray.get_runtime_context().gcs_address)
    monkeypatch.setattr(ray_cluster, "GREETING_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert asks_for_token(address), "what is no Ray is left to ray.init"
        check_credentials("auto", address)


@pytest.mark.processes
@pytest.mark.parametrize(
    "given", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "other"}]
)
def test_a_token_that_ray_refuses_is_found_without_joining(given: dict[str, str], tmp_path: Path) -> None:
    start_ray()
    address = ray.get_runtime_context().gcs_address
    code = (
        "from headrace.trainers.cluster.ray_cluster import check_credentials\n"
        "try:\n"
        f"    check_credentials('auto', '{address}')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment = {**others, "HOME": str(tmp_path), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(
        "resources.ray_address: got 'auto', expected a Ray cluster that can be joined: it has "
    )
    assert ("set RAY_AUTH_MODE=token" in done.stdout) == (not given), done.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_sigterm_while_ray_runs_and_after_it() -> None:
    code = (
        "import os, signal\n"
        "from headrace.trainers.cluster.ray_cluster import Cluster, CpuDemand\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "cluster = Cluster(address=None, num_cpus=1, demand=CpuDemand(0, 1, 0), namespace='n', object_store_mib=128)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "cluster.close()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "told\ntold\n"), done.stderr
