"""Sets the options of the TCP connections between clients and the directory."""

from __future__ import annotations

import socket

KEEP_ALIVE_S = 30
"""Seconds after which an idle connection is probed. Middleboxes forget connections that are idle for minutes."""
PROBE_S = 10
PROBES = 3
USER_TIMEOUT_MS = 60_000
"""Milliseconds for which sent data may remain unacknowledged by the peer before the connection is ended."""


def set_up(connection: socket.socket) -> None:
    """Set a TCP socket's options. Small frames are sent at once, and a dead host is noticed within about a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
