"""Defines the data plane's exceptions.

DataPlaneError
├── InvalidArgument      (also ValueError)  an argument of a call is wrong, or names what does not exist
├── SchemaMismatch       (also ValueError)  a put or read is not allowed by the partition's schema
├── DuplicateKeys        (also ValueError)  a key occurs twice in one call
├── AlreadyWritten       (also ValueError)  a put would write a field that its row has, without replace=True
├── KeysNotFound         (also KeyError)    some of the keys do not exist in the partition
├── FieldsNotReady       the keys exist, but some of the wanted fields are not written yet
├── BlobsMissing         rows of a put refer to blobs that are neither stored nor in the put
├── RowsCleared          a receipt was used after its rows were cleared or replaced
├── ForeignReceipt       (also ValueError)  a receipt comes from another run or another data plane
├── LeaseLost            rows were written, released or renewed after their lease had ended
├── SamplerError         a task's sampler raised an error or chose wrong rows
├── IntegrityError       the bytes that were read differ from the bytes that were written
├── DataPlaneTimeout     (also TimeoutError)  a wait exceeded its time limit
│   ├── ClaimTimeout     not enough rows became ready in time
│   └── CapacityExceeded no space became free in time
└── PeerLost             a process of the data plane died or did not answer in time
    ├── DirectoryLost    this is the process of the directory
    └── StoreLost        this is a process of the store
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_KEYS = 5


def shown(keys: Sequence[str], num_keys: int | None = None) -> str:
    """Return a text that lists the first few of `keys` and says how many more there are. num_keys: number of all keys;
    None means that `keys` holds them all."""
    head = ", ".join(repr(str(key)) for key in keys[:SHOWN_KEYS])
    more = (len(keys) if num_keys is None else num_keys) - SHOWN_KEYS
    return f"[{head}, ... {more} more]" if more > 0 else f"[{head}]"


class DataPlaneError(Exception):
    """Base class of the data plane's errors. The message names the operation, partition, first few keys, peer process
    and elapsed seconds, where they apply.

    Such errors can be pickled: they have only plain attributes and are rebuilt from keyword arguments.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        partition: str = "",
        keys: Sequence[str] = (),
        peer: str = "",
        elapsed_s: float | None = None,
        num_keys: int | None = None,
    ) -> None:
        self.message = message
        self.op = op
        self.partition = partition
        self.keys = tuple(str(key) for key in keys[: SHOWN_KEYS * 4])
        self.num_keys = len(keys) if num_keys is None else num_keys
        self.peer = peer
        self.elapsed_s = elapsed_s
        where = [f"op={op}"] if op else []
        if partition:
            where.append(f"partition={partition!r}")
        if len(keys):
            where.append(f"keys={shown(keys, self.num_keys)}")
        if peer:
            where.append(f"peer={peer}")
        if elapsed_s is not None:
            where.append(f"elapsed={elapsed_s:.2f}s")
        text = f"{message} ({' '.join(where)})" if where else message
        super().__init__(text)

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.fields())

    def fields(self) -> dict:
        """Return the keyword arguments of the error (operation, partition, keys, ...) as plain data, for messages
        between processes."""
        return {
            "op": self.op,
            "partition": self.partition,
            "keys": self.keys,
            "peer": self.peer,
            "elapsed_s": self.elapsed_s,
            "num_keys": self.num_keys,
        }

    def __str__(self) -> str:
        return str(self.args[0])


def _rebuild(cls: type[DataPlaneError], message: str, fields: dict) -> DataPlaneError:
    return cls(message, **fields)


class InvalidArgument(DataPlaneError, ValueError):
    """An argument of a call is wrong, or names a partition or task that does not exist. The message gives the
    argument's name, its value and what was expected."""


class SchemaMismatch(DataPlaneError, ValueError):
    """A put or read that the partition's schema does not allow."""


class DuplicateKeys(DataPlaneError, ValueError):
    """A key occurs twice in one call."""


class AlreadyWritten(DataPlaneError, ValueError):
    """A put would write a field that its row already has, and `replace` is not set."""


class KeysNotFound(DataPlaneError, KeyError):
    """Some of the keys do not exist in the partition."""


class FieldsNotReady(DataPlaneError):
    """The keys exist, but some of the wanted fields have not been written for them."""


class BlobsMissing(DataPlaneError):
    """Rows of a put refer to blobs, such as pictures, that are neither stored nor in the put. The keys are digests."""


class RowsCleared(DataPlaneError):
    """A receipt (keys and locations of rows, no content) was used after its rows were cleared or replaced."""


class ForeignReceipt(DataPlaneError, ValueError):
    """A receipt was used with a data plane that did not issue it, such as that of a later run. A receipt has the keys
    and locations of rows, not their content."""


class LeaseLost(DataPlaneError):
    """Rows were written, released or renewed by a consumer whose lease on them (an exclusive hold) had ended."""


class SamplerError(DataPlaneError):
    """A task's sampler, which chooses the rows of a claim, raised an error or chose wrong rows. A choice is wrong if it
    has a row that was not offered, or one row twice. No row was leased."""


class IntegrityError(DataPlaneError):
    """Bytes read differ from the bytes written, as their checksum or their structure shows."""


class DataPlaneTimeout(DataPlaneError, TimeoutError):
    """A wait exceeded its time limit."""


class ClaimTimeout(DataPlaneTimeout):
    """Not enough rows became ready in time for a claim. The message says which fields of how many rows were waited
    for."""


class CapacityExceeded(DataPlaneTimeout):
    """The store had no room for a put, and none became free in time. The message gives the bytes wanted, the bytes in
    use and the capacity."""


class PeerLost(DataPlaneError):
    """A process of the data plane died or did not answer within its time limit."""


class DirectoryLost(PeerLost):
    """The process of the directory, the data plane's metadata service, has died or does not answer."""


class StoreLost(PeerLost):
    """The process that holds the rows' bytes has died or does not answer."""
