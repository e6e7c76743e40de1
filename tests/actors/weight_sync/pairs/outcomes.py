"""Carries out an update of the transport `pairs` with senders and receivers of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs.group_receiver import GroupReceiver
from headrace.actors.weight_sync.pairs.group_sender import GroupSender
from headrace.actors.weight_sync.pairs.pair_receiver import PairReceiver
from headrace.actors.weight_sync.pairs.pair_sender import PairSender
from headrace.actors.weight_sync.plan.transfer_plan import Bucket, TransferPlan
from headrace.actors.weight_sync.transports.protocol import WeightTransferError, WeightUpdate

Tensors = Sequence[Mapping[str, torch.Tensor]]


def outcomes(
    senders: Sequence[PairSender | GroupSender],
    receivers: Sequence[PairReceiver | GroupReceiver],
    plan: TransferPlan,
    update: WeightUpdate,
    rows: Tensors,
    staged: Tensors,
    during: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[str]]:
    """Return how sending ended in each rank, and receiving in each worker.

    It is "" when it went well, else the engines at fault and the error. rows, staged: tensors of each sender and of
    each receiver.
    """

    def outcome(call: Callable[..., object], *args: object) -> str:
        try:
            call(*args)
        except WeightTransferError as error:
            return f"{','.join(error.engines)}|{error}"
        return ""

    with ThreadPoolExecutor(len(senders) + len(receivers)) as pool:
        sent = [pool.submit(outcome, one.send, update, plan, rank, rows[rank]) for rank, one in enumerate(senders)]
        got = [
            pool.submit(outcome, one.receive, update, plan, rank, staged[rank]) for rank, one in enumerate(receivers)
        ]
        during()
        return [one.result() for one in sent], [one.result() for one in got]


def expect_abort_while_sending(members: Any, sending: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abort version 1 of `members` when their first rank packs a bucket, and expect the reason on both sides.

    members: has `senders`, and `update`, which returns what `outcomes` does. sending: module of the senders, which
    packs.
    """

    def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        if bucket.sender == 0:
            members.senders[0].abort("the optimizer failed")

    with monkeypatch.context() as patch:
        patch.setattr(sending, "pack", pack)
        sent, got = members.update(1)
    assert "sender 0: aborted: the optimizer failed" in sent[0] and all(got)
    assert any("has ended the update: the optimizer failed" in error for error in got), got
