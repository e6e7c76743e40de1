"""The second TransferQueue baseline uses its MooncakeStore over TCP, with a mooncake master that the benchmark starts.

TransferQueue's own bootstrap (`auto_init`) ends every mooncake_master of the host, so it stays off.
"""

from __future__ import annotations

import uuid
from typing import Any

from ....dataplane.stores.mooncake_master import MooncakeMaster
from .transferqueue import TransferQueueContender

SEGMENT_BYTES = 2 << 30
"""Number of bytes that every process lends to the store, because MooncakeStore keeps rows in the process that put
them."""
BUFFER_BYTES = 1 << 30


class MooncakeContender(TransferQueueContender):
    """The TransferQueue baseline on MooncakeStore in the driver, with its own mooncake master."""

    def __init__(self, name: str) -> None:
        """Start the master and TransferQueue.

        Raises ValueError without mooncake, StoreLost or RuntimeError when the master or TransferQueue does not start.
        """
        self._master = MooncakeMaster(f"bench-{uuid.uuid4().hex[:8]}", "127.0.0.1")
        section: dict[str, Any] = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self._master.address.endpoint,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": SEGMENT_BYTES,
            "local_buffer_size": BUFFER_BYTES,
        }
        try:
            super().__init__(name, {"storage_backend": "MooncakeStore", "MooncakeStore": section})
        except BaseException:
            self._master.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._master.close()
