"""Defines the key of a run that hosts read from a file, so that Ray never carries it between them.

A pickle of such a key, and so of everything that holds it, contains the file's path and a fingerprint of the key. The
process that loads the pickle reads the file of its own host, and refuses a file that gives another key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec

from .handshake import KEY_BYTES, new_key

_opening: ContextVar[bytes | None] = ContextVar("key of the data plane that is being opened", default=None)
_KEY_FILE = "dataplane.key_file"


class RunKey(bytes):
    """Key of a run that comes from a file, or whose connections are encrypted. Other keys are plain bytes."""

    file: str
    """Path of the file from which hosts read it; "" for a key of which this process knows no file."""
    run_id: str
    tls: bool
    """Whether the run's TCP connections are encrypted by TLS."""

    @staticmethod
    def make(key: bytes, file: str, run_id: str, *, tls: bool) -> RunKey:
        """Return `key` with these attributes."""
        made = RunKey(key)
        made.file, made.run_id, made.tls = file, run_id, tls
        return made

    def __repr__(self) -> str:
        return f"RunKey(file={self.file!r}, fingerprint={fingerprint(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        if not self.file:
            return unpacked, (packed(self),)
        return _read_again, (self.file, self.run_id, self.tls, fingerprint(self))


def fingerprint(key: bytes) -> str:
    """Return a text that tells keys apart, and from which a key cannot be found."""
    return hmac.digest(key, b"headrace fingerprint", "sha256")[:8].hex()


def key_from_file(path: str, run_id: str, *, tls: bool, makes: bool = True) -> RunKey:
    """Return the key of a run from the secret in the file `path`. makes: whether a file that does not exist is made.

    Each run has another key from the same file. Raises ValueError for a file that other users can read, or that is
    damaged, and if it cannot be read or made.
    """
    path = os.path.abspath(path)
    try:
        if makes and not os.path.exists(path):
            _make(path)
        secret = _read(path)
    except OSError as error:
        raise ValueError(
            f"{_KEY_FILE}: {path} on {platform.node()} cannot be {'read or made' if makes else 'read'} "
            f"({error.strerror}), expected a file that each host of the run has, in a folder that they share, or "
            "a copy"
        ) from None
    return RunKey.make(hmac.digest(secret, b"headrace run " + run_id.encode(), "sha256"), path, run_id, tls=tls)


def check_key_file(path: str) -> None:
    """Raise ValueError unless the file `path` contains a key, or can be made. Makes nothing."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if os.path.exists(path):
        key_from_file(path, "", tls=False, makes=False)
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{_KEY_FILE}: {path} on {platform.node()} does not exist and cannot be made, expected a file, or a path "
            f"in a folder that exists and can be written to, unlike {folder}"
        )


def _read(path: str) -> bytes:
    """Return the secret in the file `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found, text = os.fstat(descriptor), file.read(4 * KEY_BYTES)
    where = f"{_KEY_FILE}: {path} on {platform.node()}"
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{where} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to user {found.st_uid}, expected mode "
            f"0600 and user {os.geteuid()}, because its readers can join the run; if others may have read it, "
            "remove it, and the next run makes another"
        )
    with contextlib.suppress(ValueError):
        secret = bytes.fromhex(text.decode("ascii"))
        if len(secret) == KEY_BYTES:
            return secret
    raise ValueError(
        f"{where} is no key, expected a file that Headrace made, with {2 * KEY_BYTES} hexadecimal digits, or a path at "
        "which there is no file yet"
    )


def _make(path: str) -> None:
    """Make a file with a new secret. Of several processes that do so at once, the first one's stays."""
    new = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(new_key().hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)


def _read_again(path: str, run_id: str, tls: bool, expected: str) -> RunKey:
    """Return the key whose pickle this process loads."""
    key = key_from_file(path, run_id, tls=tls, makes=False)
    if fingerprint(key) != expected:
        raise ValueError(
            f"{_KEY_FILE}: {path} on {platform.node()} has another key than on the host that opened the data plane, "
            "expected the same file on all hosts; copy it from there"
        )
    return key


def key_error(path: str, expected: str) -> str:
    """Return why this host's key in the file `path` is not the one with the fingerprint `expected`; "" if it is."""
    try:
        _read_again(path, "", False, expected)
    except ValueError as error:
        return str(error)
    return ""


def packed(key: bytes) -> bytes:
    """Return the key itself with its attributes, for a pipe to a child process or for a handle's text."""
    if not isinstance(key, RunKey):
        return key
    return bytes(key) + msgspec.msgpack.encode((key.file, key.run_id, key.tls))


def unpacked(data: bytes) -> bytes:
    """Return the key that `packed` packed. Raises ValueError for other bytes."""
    if len(data) <= KEY_BYTES:
        return data
    file, run_id, tls = msgspec.msgpack.decode(data[KEY_BYTES:], type=tuple[str, str, bool])
    return RunKey.make(data[:KEY_BYTES], file, run_id, tls=tls)


def opened_key() -> bytes:
    """Return the key that `opens_with` gives, else a new random one."""
    return _opening.get() or new_key()


@contextlib.contextmanager
def opens_with(key: bytes | None) -> Iterator[None]:
    """Context manager in which the new data plane's store gets this key. None leaves the choice to `opened_key`."""
    token = _opening.set(key)
    try:
        yield
    finally:
        _opening.reset(token)
