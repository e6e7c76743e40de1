"""Defines the base class of all sections of the configuration, and the section `dataplane`."""

from __future__ import annotations

import os
import types
import typing
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from .listen_address import PortRange

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
MAX_SECONDS = 1e9
"""Longest time limit in seconds, about 32 years. A longer one means the same: no limit in practice."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Largest length of a path, and of one name in it, that Linux takes."""


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"got {text!r:.80}, expected text without NUL characters")
    return text


def _as_path(text: str) -> str:
    """Return a path with the home folder in place of a leading `~`. Raises ValueError if Linux cannot open it."""
    path = os.path.expanduser(text)
    longest = max(len(name.encode(errors="replace")) for name in path.split("/"))
    if longest > MAX_NAME_BYTES or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise ValueError(
            f"got {text!r:.80}..., expected a path of at most {MAX_PATH_BYTES} bytes with names of at most "
            f"{MAX_NAME_BYTES}"
        )
    return path


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
PathText = Annotated[Text, AfterValidator(_as_path)]
"""Text that is or can be a path. A leading `~` or `~user` becomes the home folder here, and nowhere else."""
PortText = Annotated[Text, AfterValidator(lambda text: str(PortRange.parse(text)))]
"""Range of TCP ports, such as `20000-20999`."""


def _takes(annotation: Any, numbers: tuple[type, ...], *, listed: bool) -> bool:
    """Return whether a field's type is one of `numbers`, or has it inside Annotated or `| None`. listed: True also
    looks into lists."""
    origins = (typing.Union, Annotated, *((tuple, list) if listed else ()))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in origins:
        return any(_takes(part, numbers, listed=listed) for part in typing.get_args(annotation))
    return annotation in numbers


def encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text, which half of a surrogate pair prevents."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Section(BaseModel):
    """Base class of a section of the configuration, which refuses unknown keys and infinite numbers and is immutable.

    A section is declared beside the code that reads it, and is sent to the process of that code unchanged. The
    docstring under each key is its entry in the configuration reference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError when a key that takes numbers is given `true`, `false` or a whole number beyond 64 bits.

        pydantic would read `true` as 1, and messages between processes cannot hold more than 64 bits.
        """
        annotation, listed = cls.model_fields[info.field_name or ""].annotation, isinstance(value, list | tuple)
        for one in value if listed else [value]:
            if isinstance(one, bool) and _takes(annotation, (int, float), listed=listed):
                raise ValueError(f"got {str(one).lower()}, expected a number")
            if isinstance(one, int) and abs(one) >= 1 << 63 and _takes(annotation, (int,), listed=listed):
                raise ValueError(f"got {one}, expected a number below 2**63")
        return value


MAX_BLOCK_ROWS = 1 << 24
"""Largest number of rows that a block (a group of rows stored together) can have."""

StoreKind = Literal["auto", "local", "shm", "tcp", "ray", "simple", "mooncake"]


class StoreConfig(Section):
    """Store that holds the rows' bytes, and its capacity."""

    kind: StoreKind = "auto"
    """Kind of the store. `local` keeps the bytes in the process of the directory, the service that keeps the rows'
    metadata. `shm` keeps them in shared memory of one host. `tcp` keeps them in storage units, one on each host, from
    which other hosts read over TCP. `ray` keeps them in Ray's object store. `simple` keeps them in TransferQueue's
    storage units. `mooncake` keeps them in a Mooncake store. `auto` is `shm` when the run is on one host, else
    `tcp`."""
    capacity_mib: Count = 1024
    """Largest number of MiB that rows can take in the store at the same time. A put that would exceed it waits. For the
    store `tcp`, it is the room of each host with rollout actors or train workers: rows are stored on their writer's
    host, and on another one if that has no room (the metric `dataplane/puts_elsewhere` counts such puts). An eighth of
    each host's room is kept for its own writers."""
    num_units: Count | None = None
    """Number of storage units that the stores `tcp` and `simple` start, each in its own process. Unset: one unit per
    host for `tcp`, one unit in total for `simple`. For `tcp`, a number has an effect only when the run is on one
    host."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Network protocol of the store `mooncake`. With `rdma`, a host without a usable RDMA device is an error: the store
    never silently falls back to TCP."""
    device: str = ""
    """Names of the RDMA devices that the store `mooncake` uses, separated by commas, such as `mlx5_0,mlx5_1`. An empty
    string selects all devices."""


class DataPlaneConfig(Section):
    """The data plane between rollouts and train workers: its store, and the time limits of its calls and leases."""

    store: StoreConfig = StoreConfig()
    """The store that holds the rows' bytes."""
    trusted_network: bool = False
    """Whether every peer that can reach this run's hosts over the network is trusted. A Ray cluster that asks for no
    token needs `true`, because it runs code that any peer sends. So do the stores `simple` and `mooncake`, even on one
    host, because their processes open ports on the network that require no key. The processes of `simple` run code that
    any peer sends, too."""
    key_file: PathText | None = None
    """File on a folder that all hosts share, or with the same content on each, from which every process reads the run's
    key. It is made with mode 0600 if it does not exist. Ray then carries only the path and a fingerprint of the key.
    Unset: a random key for each run, which Ray carries to the run's processes."""
    tls: bool = False
    """Whether the TCP connections of the directory, the storage units, the weights' control links and the rendezvous
    are encrypted and authenticated by TLS 1.3. Needs `key_file`, and the extra `tls` on all hosts. It does not cover
    gloo, NCCL and Ray itself."""
    integrity: Literal["auto", "off", "verify"] = "auto"
    """Check for damaged rows. `auto` checks the rows that cross hosts, in both directions, and leaves out those that
    stay on a host. Between hosts, the store `tcp` computes the xxh3 of all bytes of a request at both ends, unless
    `tls` finds every change, and the stores `ray`, `simple` and `mooncake` do what `verify` does. `verify` writes xxh3
    checksums with the rows, one checksum per 256 rows of a field, and checks them at every read. `off` does neither."""
    samplers: tuple[str, ...] = ()
    """Import paths (`package.module:factory`) of the samplers that tasks can name besides the built-in ones. The
    directory's process imports no other path, whatever a client asks for. The sampler of `algorithm.sampler` need not
    be listed."""
    timeout_s: Seconds = 30.0
    """Seconds after which a call to the data plane fails when its caller gives no time limit."""
    lease_s: Seconds = 600.0
    """Seconds for which a lease, a consumer's hold on the rows that it has claimed, lasts after its last renewal. A
    running consumer renews its leases, however long it works. The rows of a consumer that has died or is stopped can be
    claimed again after this time."""
    reserve_s: Seconds = 60.0
    """Seconds after which a writer that has not committed its put is considered dead and its space is freed."""
    directory_shards: Count = 1
    """Number of directories, each in its own process with its own part of the store. A partition is served by one of
    them, chosen by its name, so more than one helps only programs with several busy partitions. A run, whose rows are
    in one partition, refuses more than one. Each part of the store gets an equal part of `store.capacity_mib`."""
    block_rows: Annotated[int, pydantic.Field(ge=1, le=MAX_BLOCK_ROWS)] | None = None
    """Largest number of rows in a block, the piece of data that the store keeps and frees as a whole. A group (the rows
    of one prompt) is split over several blocks only when it has more rows than this. With the group size as the value,
    each group is a block, so that train ranks fetch only the bytes of their own groups. Unset: 256 rows, but more where
    a block would be smaller than 64 KiB, and fewer where a field of a block would be larger than 4 MiB."""

    @pydantic.model_validator(mode="after")
    def _key_before_tls(self) -> DataPlaneConfig:
        if self.tls and self.key_file is None:
            raise ValueError(
                "got tls=true without key_file, expected key_file=PATH, where the run makes a file if there is none, "
                "because Ray would otherwise send the run's key, and others could read it"
            )
        return self

    def with_sampler(self, name: str) -> DataPlaneConfig:
        """Return the section with `name` among the samplers that may be imported, if it is an import path."""
        if ":" not in name or name in self.samplers:
            return self
        return self.model_copy(update={"samplers": (*self.samplers, name)})
