"""Ties the rows of a claim to its receipts in this process, so that rows that nothing refers to are given back."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import DataPlaneError, InvalidArgument, LeaseLost

_logger = logging.getLogger(__name__)


class LeaseHold:
    """One lease of a client in this process. The receipt of the claim and all receipts made of it share it. When it is
    garbage-collected, its client gives back the rows that are left."""

    def __init__(
        self,
        lease_id: int,
        partition: str,
        task: str,
        left: dict[str, int],
        client: weakref.ref[Any],
        on_hand_over: Callable[[], None],
    ) -> None:
        """left: generation of each row by its key; the client takes out the rows that it releases or clears. client:
        the client that claimed the rows. on_hand_over: function with which the client stops to watch this hold."""
        self.lease_id = lease_id
        self.partition = partition
        self.task = task
        self.left = left
        self._client = client
        self._on_hand_over = on_hand_over

    def hand_over(self) -> None:
        """Keep the rows leased when this hold is garbage-collected. Idempotent."""
        self._on_hand_over()

    def end(self, part: Any, error: BaseException | None) -> None:
        """Release the rows of the receipt `part` at the end of a `with`: as done, or for retry after `error`."""
        try:
            waiting = self._ended(part, error)
        except DataPlaneError as failure:
            _raise_unless(error, failure)
        else:
            if inspect.iscoroutine(waiting):
                waiting.close()
                raise InvalidArgument("with: the receipt is of an asyncio client, expected `async with`")

    async def end_async(self, part: Any, error: BaseException | None) -> None:
        """Release rows as `end` does, for the receipt of an asyncio client."""
        try:
            await self._ended(part, error)
        except DataPlaneError as failure:
            _raise_unless(error, failure)

    def _ended(self, part: Any, error: BaseException | None) -> Any:
        client = self._client()
        if client is None:
            raise LeaseLost("the client that claimed the rows has ended", partition=self.partition, keys=part.keys)
        return client.release(part, self.task, "done" if error is None else "retry")


def _raise_unless(error: BaseException | None, failure: DataPlaneError) -> None:
    """Raise `failure`, unless the `with` ends with `error`, which must not be hidden by it."""
    if error is None:
        raise failure
    _logger.warning("rows were not given back after %s: %s", type(error).__name__, failure)
