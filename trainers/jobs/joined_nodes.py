"""Waits until every node of a job has joined its Ray: `python -m headrace.trainers.jobs.joined_nodes ADDRESS NODES S`.

A run that joins a Ray counts the free CPUs and GPUs at once, so it must not begin before the last node is there.
"""

from __future__ import annotations

import logging
import sys
import time

import ray


def wait_for_nodes(address: str, nodes: int, timeout_s: float) -> str:
    """Wait until `nodes` nodes have joined the Ray at `address`. Returns "", or after `timeout_s` seconds one sentence
    with the nodes that have joined."""
    until = time.monotonic() + timeout_s
    joined: list[str] = []
    why = ""
    while time.monotonic() < until:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            joined = [
                f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes() if node["Alive"]
            ]
            if len(joined) >= nodes:
                ray.shutdown()
                return ""
        except (ConnectionError, RuntimeError) as error:  # The first node's Ray is still starting.
            why = f", and the last try ended with {' '.join(str(error).split())}"
        time.sleep(0.5)
    return (
        f"{len(joined)} of {nodes} nodes joined Ray at {address} within {timeout_s:g} s, expected all: "
        f"{', '.join(joined) or 'none'}{'' if joined else why}"
    )


if __name__ == "__main__":
    problem = wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    if problem:
        sys.exit(f"headrace: {problem}")
