"""Checks that a run can join the Ray cluster that it names, or start a Ray of its own, before it does so."""

from __future__ import annotations

from ....actors.process.memory import assumed_machine
from ....actors.process.socket_folder import ray_folder, vllm_folder
from ....dataplane.listen_address import address_of
from ...config.config import ResourcesConfig


def check_ray_address(given: str | None, *, trusted_network: bool) -> None:
    """Raise UserError if the Ray cluster of `resources.ray_address` cannot be reached, or refuses this process.

    Also raises it for one that asks for no token on a network that is not trusted. A no-op for a run with its own Ray.
    """
    if given is None or given == "local" or assumed_machine() is not None:
        return
    from ...cluster.ray_cluster import check_credentials, check_token, reached  # Only this check needs to import Ray.

    address = reached(given)
    check_token(address, trusted_network=trusted_network)
    check_credentials(given, address)


def check_interface(resources: ResourcesConfig) -> None:
    """Raise ValueError if this host, at which the driver listens in a run on several hosts, lacks the interface."""
    if resources.interface is not None and resources.ray_address is not None and assumed_machine() is None:
        address_of(resources.interface)


def check_sockets(ray_address: str | None, engine: str) -> None:
    """Raise ValueError if the paths of the sockets of Ray or vLLM would be too long on this machine."""
    if ray_address is None:
        ray_folder()
    if engine == "vllm":
        vllm_folder()
