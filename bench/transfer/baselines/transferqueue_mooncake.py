"""The second TransferQueue baseline uses its MooncakeStore over TCP, with its own Mooncake master (metadata server).

TransferQueue could start the master itself (`auto_init`), but would then end every mooncake_master of the host. So the
benchmark starts it, and that option stays off.
"""

from __future__ import annotations

import uuid
from typing import Any

from ....dataplane.stores.mooncake_processes import MooncakeMaster
from .transferqueue import TransferQueueContender

SEGMENT_BYTES = 2 << 30
"""Number of bytes that every process lends to the store, because MooncakeStore keeps rows in the process that put
them."""
BUFFER_BYTES = 1 << 30


class MooncakeContender(TransferQueueContender):
    """The TransferQueue baseline on MooncakeStore in the driver, with its own Mooncake master (metadata server)."""

    def __init__(self, name: str) -> None:
        """Start the Mooncake master and TransferQueue.

        Raises ValueError if mooncake is not installed, and StoreLost or RuntimeError if the Mooncake master or
        TransferQueue does not start.
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
