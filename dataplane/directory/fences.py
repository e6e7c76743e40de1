"""Checks that a put writes to the rows that its writer means: rows that were neither cleared nor taken by another."""

from __future__ import annotations

import numpy as np

from ..errors import LeaseLost, RowsCleared
from .calls import Fence, PutRows
from .partition import Partition
from .rows import pick
from .task_cursor import LeaseBook


def check_fences(part: Partition, leases: LeaseBook, put: PutRows) -> None:
    """Check a put against its fences. Raises RowsCleared naming rows that do not exist any more, or were cleared and
    put again since. Raises LeaseLost naming rows that none of a fence's leases holds."""
    if put.fences:
        rows = part.rows.find(put.keys)
        for fence in put.fences:
            _check(part, leases, put, fence, rows)


def _check(part: Partition, leases: LeaseBook, put: PutRows, fence: Fence, rows: np.ndarray) -> None:
    if fence.generations is None:
        fenced, same = np.ones(len(rows), dtype=bool), rows >= 0
    else:
        fenced, same = fence.generations >= 0, np.zeros(len(rows), dtype=bool)
        same[rows >= 0] = part.rows.arrivals[rows[rows >= 0]] == fence.generations[rows >= 0]
    gone = pick(put.keys, np.flatnonzero(fenced & ~same))
    if gone:
        message = f"{len(gone)} of {len(put.keys)} rows were cleared since the receipt was issued; nothing is written"
        raise RowsCleared(message, op="put", partition=part.name, keys=gone)
    if not fence.leases:
        return
    held = ~fenced
    for lease_id in fence.leases:
        lease = leases.get(lease_id)
        if lease is not None and lease.partition == part.name:
            held[fenced] |= part.tasks[lease.task].column[rows[fenced]] == lease_id
    lost = pick(put.keys, np.flatnonzero(~held))
    if lost:
        message = f"the receipt's lease no longer holds {len(lost)} of {len(put.keys)} rows; nothing is written"
        raise LeaseLost(message, op="put", partition=part.name, keys=lost)
