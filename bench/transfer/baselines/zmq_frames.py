"""The zmq baseline sends one message with a frame per field over TCP loopback."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from tensordict import TensorDict

from ..contenders import Share
from ..digests import Digests
from ..workloads import Load
from .byte_parts import digest, parts_of, slices

TIMEOUT_MS = 60_000
POLL_MS = 200
_PUT, _ACK = b"put", b"ack"


class ZmqServer:
    """Keeps the frames of the last message that it received and sends pieces of them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address: tuple[str, int] = ("127.0.0.1", int(port))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="zmq-baseline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)

    def _serve(self) -> None:
        held: list[Any] = []
        while not self._closed.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            request = self._socket.recv_multipart(copy=False)
            if request[0].bytes == _PUT:
                held = request[1:]
                self._socket.send(_ACK)
                continue
            share = Share(int(request[0].bytes), int(request[1].bytes), np.empty(0, np.int64))
            pieces = slices([np.frombuffer(frame.buffer, np.uint8) for frame in held], share)
            self._socket.send_multipart([piece.data for piece in pieces], copy=False)
        self._socket.close()
        self._context.term()


class ZmqEndpoint:
    """The ZeroMQ baseline in a worker process, with one REQ socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.rcvtimeo = self._socket.sndtimeo = TIMEOUT_MS
        self._socket.connect(f"tcp://{address[0]}:{address[1]}")
        self._parts: list[np.ndarray] = []

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> None:
        self._parts = self._parts or parts_of(load)
        self._socket.send_multipart([_PUT, *[part.data for part in self._parts]], copy=False)
        assert self._socket.recv() == _ACK

    def get(self, token: None, share: Share, fields: Sequence[str] | None) -> list[np.ndarray]:
        """Request the share's pieces and return views of the received frames."""
        self._socket.send_multipart([b"%d" % share.index, b"%d" % share.count])
        frames = self._socket.recv_multipart(copy=False)
        return [np.frombuffer(frame.buffer, np.uint8) for frame in frames]

    def expected(self, load: Load, share: Share) -> Digests:
        return digest(slices(parts_of(load), share))

    def fingerprint(self, got: list[np.ndarray]) -> Digests:
        return digest(got)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._parts = []
