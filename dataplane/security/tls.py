"""Encrypts the TCP connections of a run by TLS 1.3, after the handshake in which both ends have proved the run's key.

Both ends present the run's certificate and accept no other one. Each process derives it, and its private key, from the
run's key, so neither is ever sent or stored. TLS draws a secret for each connection, so the run's key does not
decrypt a recorded connection. Unix sockets, which no network carries, stay as they are.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hmac
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from ..imports import MissingExtra
from ..listen_address import join_host
from .handshake import HandshakeError, left_s
from .run_key import RunKey, fingerprint

_RECORD_BYTES = 16 << 10
"""Largest number of bytes of a record of TLS."""
_TIME = struct.Struct("ll")


class TlsError(HandshakeError):
    """The other end has no certificate of this run, or bytes were changed on the way."""


def is_encrypted(key: bytes) -> bool:
    """Return whether the TCP connections of the run with this key are encrypted."""
    return isinstance(key, RunKey) and key.tls


def server_name(key: bytes) -> str:
    """Return the name in the run's certificate."""
    return f"{fingerprint(key)}.headrace.invalid"


@functools.lru_cache(maxsize=8)
def context(key: bytes, *, server: bool) -> ssl.SSLContext:
    """Return the settings of one end of the connections of a run. Raises MissingExtra without `cryptography`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    certificate, private = _certificate(key)
    made.load_verify_locations(cadata=certificate.decode())
    # The module ssl reads private keys from files only. This one exists in memory alone.
    descriptor = os.memfd_create("headrace-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, private + certificate)
        made.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if server:
        made.num_tickets = 0  # A ticket would make an idle connection readable, which means its end.
    return made


def _certificate(key: bytes) -> tuple[bytes, bytes]:
    """Return the run's certificate and its private key as PEM. They are the same in all processes of the run."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise MissingExtra("cryptography", "dataplane.tls", "tls") from None
    private = Ed25519PrivateKey.from_private_bytes(hmac.digest(key, b"headrace certificate", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "headrace run")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=private.public_key(),
        serial_number=1 + int.from_bytes(hmac.digest(key, b"headrace serial", "sha256")[:8]),
        # Clocks of hosts differ, also by decades where none was set, and the certificate ends with the run.
        not_valid_before=datetime.datetime(1950, 1, 1),
        not_valid_after=datetime.datetime(9999, 12, 31),
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(key))]), critical=False)
    pem = serialization.Encoding.PEM
    form, cipher = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return builder.sign(private, None).public_bytes(pem), private.private_bytes(pem, form, cipher)


@contextlib.contextmanager
def named(end: str, *, ready: bool = True) -> Iterator[None]:
    """Context manager that turns errors of TLS into a ConnectionError that names the other end. ready: whether both
    ends have shown their certificates. `SSLWantReadError` and `SSLWantWriteError` are passed on."""
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise
    except ssl.SSLError as error:
        raise tls_error(error, end, ready=ready) from None


def tls_error(error: ssl.SSLError, end: str, *, ready: bool) -> ConnectionError:
    """Return the error that says what TLS found, naming the other end."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionResetError(f"{end} closed the connection")
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return TlsError(f"{end} got bytes that were changed on the way, or no certificate of its run (TLS: {reason})")
    if ready:
        return TlsError(f"bytes from {end} were changed on the way (TLS: {reason})")
    return TlsError(f"{end} has no certificate of this run, or bytes were changed on the way (TLS: {reason})")


def secured(connection: socket.socket, key: bytes, service: str, deadline: float) -> socket.socket:
    """Encrypt a client's blocking connection, and return it in a form that works like a socket. Closes it on an error.

    Raises TlsError when the server has no certificate of this run, TimeoutError at the deadline, and ConnectionError
    when the server ends the connection.
    """
    end = f"the {service} at {join_host(*connection.getpeername()[:2])}"
    encrypted = wrapped(connection, key, server=False)
    try:
        encrypted.settimeout(left_s(deadline))
        with named(end, ready=False):
            encrypted.do_handshake()
        return as_socket(encrypted, end)
    except BaseException:
        encrypted.close()
        raise


def wrapped(connection: socket.socket, key: bytes, *, server: bool) -> ssl.SSLSocket:
    """Return a socket that takes the place of a connected one, before the certificates are shown."""
    name = None if server else server_name(key)
    settings = context(key, server=server)
    return settings.wrap_socket(
        connection, server_side=server, do_handshake_on_connect=False, server_hostname=name, suppress_ragged_eofs=True
    )


def as_socket(connection: ssl.SSLSocket, end: str) -> socket.socket:
    """Return a connection whose certificates were shown in a form that works like a socket. end: name of the other end
    in errors."""
    return cast(socket.socket, SecureSocket(connection, end))


class SecureSocket:
    """Encrypted connection with those methods of a socket that Headrace uses. One thread may send while another one
    receives, which `ssl.SSLSocket` does not allow in Python 3.11 (its calls of OpenSSL would overlap)."""

    def __init__(self, connection: ssl.SSLSocket, end: str) -> None:
        self.family = connection.family
        self._socket = connection
        self._end = end
        self._timeout_s: float | None = None
        connection.setblocking(False)
        self._limits_s: dict[int, float] = {}
        """Time limits that the kernel would keep: SO_RCVTIMEO or SO_SNDTIMEO -> seconds; 0 for none."""
        self._calls = threading.Lock()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, microseconds = _TIME.unpack(value)
            self._limits_s[option] = seconds + microseconds * 1e-6
        else:
            self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._socket, how)  # That of SSLSocket would make later reads return encrypted bytes.

    def close(self) -> None:
        socket.socket.close(self._socket)

    def __enter__(self) -> SecureSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_PEEK:
            return b"?" if self._socket.pending() else socket.socket.recv(self._socket, nbytes, flags)
        data = bytearray(min(nbytes, _RECORD_BYTES))
        return bytes(data[: self.recv_into(memoryview(data))])

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        started = time.monotonic()
        while True:
            try:
                return self._read(view)
            except ssl.SSLWantReadError:
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError from None
                self._wait(select.POLLIN, socket.SO_RCVTIMEO, started)

    def recvmsg_into(self, pieces: Sequence[memoryview], ancillary: int = 0, flags: int = 0) -> tuple[int]:
        """Fill as many of the pieces as have arrived, at least a part of the first one."""
        total = self.recv_into(pieces[0])
        at, done = 0, total
        while total:
            if done == pieces[at].nbytes:
                at, done = at + 1, 0
                if at == len(pieces):
                    break
            try:
                count = self._read(pieces[at][done:])
            except ssl.SSLWantReadError:
                break
            if not count:
                break
            total, done = total + count, done + count
        return (total,)

    def _read(self, view: memoryview) -> int:
        with self._calls, named(self._end):
            return self._socket.recv_into(view)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        with self._sending:
            while view.nbytes:
                view = view[self._send(view, time.monotonic()) :]

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Send a part of the pieces, and return its number of bytes."""
        first = pieces[0]
        if first.nbytes < _RECORD_BYTES and len(pieces) > 1:  # Small pieces share a record.
            joined = bytearray()
            for piece in pieces:
                joined += piece[: _RECORD_BYTES - len(joined)]
                if len(joined) == _RECORD_BYTES:
                    break
            first = memoryview(joined)
        with self._sending:
            return self._send(first, time.monotonic())

    def _send(self, view: memoryview, started: float) -> int:
        while True:
            try:
                with self._calls, named(self._end):
                    return self._socket.send(view)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, socket.SO_SNDTIMEO, started)

    def _wait(self, event: int, option: int, started: float) -> None:
        """Wait until the socket is ready, or raise what a socket raises at its time limit."""
        limit_s = self._limits_s.get(option) or self._timeout_s
        poll = select.poll()
        if self._socket.fileno() < 0:  # Another thread has closed the socket.
            raise ConnectionResetError("the connection was closed")
        poll.register(self._socket.fileno(), event)
        if not poll.poll(None if limit_s is None else max(0.0, (started + limit_s - time.monotonic()) * 1e3)):
            raise BlockingIOError if self._limits_s.get(option) else TimeoutError("timed out")


class ServerStream:
    """Server's end of an encrypted connection of an event loop, without I/O."""

    def __init__(self, key: bytes, end: str) -> None:
        """end: name of the client in errors."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context(key, server=True).wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._end = end
        self.ready = False
        """Whether both ends have shown their certificates."""

    def receive(self, data: bytes) -> bytes:
        """Return what the bytes that have arrived say. Raises TlsError if the client has no certificate of this run or
        the bytes were changed, and ConnectionError when the client ends the connection. Send `answer()` afterwards."""
        self._incoming.write(data)
        found: list[bytes] = []
        try:
            with named(self._end, ready=self.ready):
                if not self.ready:
                    self._object.do_handshake()
                    self.ready = True
                while part := self._object.read(1 << 16):
                    found.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(found)

    def answer(self, *parts: bytes) -> bytes:
        """Return the bytes to send: what TLS itself has to say, and then `parts`, encrypted."""
        for part in parts:
            self._object.write(part)
        return self._outgoing.read()
