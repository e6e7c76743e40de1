"""Builds baselines by name, and says which of them cannot run on this machine."""

from __future__ import annotations

from ....trainers.run.checks import doctor
from ..contenders import Contender
from .served import Host, ServedContender

SECOND_RUN = "transferqueue_mooncake"
"""Baseline that is measured in a second run, because one Ray cluster cannot host it together with `transferqueue`."""
NAMES = ("transferqueue", SECOND_RUN, "ray", "memcpy", "tcp", "zmq")
_NEED_RAY = ("transferqueue", SECOND_RUN, "ray")


def contender_name(name: str) -> str:
    """Return the name under which a baseline's results are reported. It differs for `ray` and `tcp`, because stores
    have these names, too."""
    return {"ray": "ray put", "tcp": "raw tcp"}.get(name, name)


def why_absent(name: str, in_process: bool) -> str:
    """Return why a baseline cannot be measured and how to change that; "" when it can."""
    if in_process and name in _NEED_RAY:
        return "needs Ray, which this run does not use"
    if name != SECOND_RUN:
        return ""
    error = doctor.try_imports({name: ("mooncake.store",)})[name]
    remedy = "apt-get install libibverbs1" if "libibverbs" in error else "pip install -e '.[mooncake]'"
    return f"{error}; to get it: {remedy}" if error else ""


def open_baseline(name: str, host: Host) -> Contender:
    """Start the baseline `name` and return it. If it has a server, that runs on `host`. Raises ValueError for an
    unknown name."""
    if name == "transferqueue":
        from .transferqueue import TransferQueueContender

        return TransferQueueContender()
    if name == SECOND_RUN:
        from .transferqueue_mooncake import MooncakeContender

        return MooncakeContender(name)
    if name == "ray":
        from .ray_put import RayPutContender

        return RayPutContender()
    if name == "memcpy":
        from .memcpy import MemcpyContender

        return MemcpyContender()
    if name == "tcp":
        from .tcp_loopback import TcpEndpoint, TcpServer

        return ServedContender(contender_name(name), host, TcpServer, TcpEndpoint)
    if name == "zmq":
        from .zmq_frames import ZmqEndpoint, ZmqServer

        return ServedContender(name, host, ZmqServer, ZmqEndpoint)
    raise ValueError(f"baseline {name!r}: expected one of {', '.join(NAMES)}")
