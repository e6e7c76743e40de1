"""An update that makes progress can take longer than `sync.timeout_s`, which bounds each of its waits."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import (
    Deadline,
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
)
from headrace.dataplane.security.handshake import new_key

WEIGHTS = {f"w{n}": torch.full((1024,), float(n)) for n in range(8)}
TIMEOUT_S = 2.0
KEY = new_key()


@pytest.mark.long
def test_many_short_waits_do_not_add_up_to_the_bound_of_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(update_slowly, kind, tmp_path) for kind in ("ipc", "collective", "disk")]:
            done.result()


def update_slowly(kind: str, folder: Path) -> None:
    sync = SyncConfig(timeout_s=TIMEOUT_S)
    config = SenderConfig(f"slow-{uuid.uuid4().hex[:8]}", sync, folder=str(folder), key=KEY)
    publisher, inbox = (
        WeightPublisher(build_sender(kind, config), sync, 4096),
        WeightInbox(ReceiverConfig("e", sync, key=KEY), 0),
    )
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()}
    update = publisher.open(1, specs, [ReceiverGroup("e", 1)])

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for weight in WEIGHTS.items():
            time.sleep(TIMEOUT_S / 5)
            yield weight

    errors: list[Exception] = []

    def send() -> None:
        try:
            publisher.publish(update, slow())
        except WeightTransferError as error:
            errors.append(error)

    sender, started = threading.Thread(target=send), time.monotonic()
    sender.start()
    try:
        inbox.prepare(update)
        assert time.monotonic() - started > TIMEOUT_S
        staged = inbox.staged
        assert staged is not None and all(torch.equal(staged.named[name], WEIGHTS[name]) for name in WEIGHTS)
    finally:
        sender.join()
        inbox.close()
        publisher.close()
    assert not errors and inbox.num_received == len(WEIGHTS)


def test_a_deadline_runs_from_the_last_progress_and_ends_at_once_when_it_is_stopped() -> None:
    deadline = Deadline("sender", 3, 0.2)
    for _ in range(4):
        time.sleep(0.06)
        deadline.moved()
    assert deadline.left_s > 0.0 and deadline.elapsed_s > 0.2
    with pytest.raises(WeightTransferError, match="weights: version 3: sender: nothing came after"):
        deadline.wait(lambda: False, lambda: ("nothing came", ()))
    deadline.moved()
    deadline.stop()
    assert deadline.left_s == 0.0
