"""Defines the handle with which a process joins a run's data plane."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib
from dataclasses import dataclass, field

import msgspec

from .block_store import StoreSpec
from .config import DataPlaneConfig
from .rpc.frames import DirectoryAddress
from .security.run_key import packed, unpacked

_TEXT_PREFIX = "headrace3."
_SUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class DataPlaneHandle:
    """Description of a run's data plane. Plain and picklable; `factory.connect` makes a client from it in any process
    of the run."""

    run_id: str
    config: DataPlaneConfig
    store: StoreSpec
    actor_name: str
    """Name of the Ray actor that runs the directory (the metadata service); "" when it does not run in a Ray actor."""
    address: DirectoryAddress | None
    """Address at which the directory (the metadata service) listens; None when the directory runs in the process that
    opened it."""
    peer: str
    """Name, pid and host of the directory (the metadata service), for error messages."""

    shards: tuple[DataPlaneHandle, ...] = ()
    """Handles of the further directories of a data plane with `directory_shards` above 1."""

    def over_sockets(self) -> DataPlaneHandle:
        """Return a handle whose clients reach units of the store `tcp` over sockets even on their own host. Clients of
        other hosts always do. Tests and benchmarks use it."""
        store = dataclasses.replace(self.store, address={**self.store.address, "shares_memory": False})
        return dataclasses.replace(self, store=store, shards=tuple(shard.over_sockets() for shard in self.shards))

    @property
    def verifies_blocks(self) -> bool:
        """Whether blocks are written with checksums, which every reader verifies. With integrity `auto`, they are if
        bytes cross hosts in a store that does not check them on the way. The stores `tcp` and `local` do."""
        integrity, address = self.config.integrity, self.address
        on_the_way = self.store.kind not in ("tcp", "local") and address is not None and bool(address.host)
        return integrity == "verify" or integrity == "auto" and on_the_way

    def to_text(self) -> str:
        """Return the handle as a short text of letters, digits, "-", "_" and ".", with which any process can `connect`.

        The text contains the run's key: its holder can read and write all rows. Raises ValueError for a data plane that
        was opened with in_process=True, which only its own process can use.
        """
        if self.address is None:
            raise ValueError(
                "to_text: the data plane was opened with in_process=True, which no other process can use; "
                "open it with process=True"
            )
        body = msgspec.msgpack.encode([_address_parts(handle) for handle in (self, *self.shards)])
        return _TEXT_PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class PlaneText:
    """Contents of a handle's text: where the directory listens, and the run's key."""

    run_id: str
    address: DirectoryAddress
    key: bytes = field(repr=False)
    shards: tuple[PlaneText, ...] = ()
    """Contents for the further directories of the data plane."""

    @staticmethod
    def parse(text: str) -> PlaneText:
        """Decode what `DataPlaneHandle.to_text` returned. Raises ValueError for any other text, and for one in which a
        character was changed."""
        text = text.strip()
        body = text.removeprefix(_TEXT_PREFIX)
        try:
            if body == text:
                raise ValueError
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            found, data = data[:_SUM_BYTES], data[_SUM_BYTES:]
            if found != _checksum(data):
                raise ValueError
            parts = msgspec.msgpack.decode(data, type=list[tuple[str, str, str, int, bytes]])
            first, *others = [
                PlaneText(run_id, DirectoryAddress(local, host, port), unpacked(key))
                for run_id, local, host, port, key in parts
            ]
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise ValueError(
                f"handle: got a text of {len(text)} characters, whose checksum is wrong or missing, expected what "
                f"plane.handle.to_text() returned, which begins with {_TEXT_PREFIX!r}"
            ) from None
        return dataclasses.replace(first, shards=tuple(others))


def _address_parts(handle: DataPlaneHandle) -> tuple[str, str, str, int, bytes]:
    address = handle.address
    assert address is not None, "all directories of a data plane are opened in the same way"
    return handle.run_id, address.local, address.host, address.port, packed(handle.store.key)


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_SUM_BYTES)
