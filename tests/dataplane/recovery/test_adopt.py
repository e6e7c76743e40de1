"""A pool of memory whose host goes on in another process."""

from __future__ import annotations

import copy
import os
import random

import numpy as np

from headrace.codecs.blocks import BlockLayout
from headrace.dataplane.block_store import Want
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.owned_folder import process_start
from headrace.dataplane.stores.shared_memory import _LOCATION, SharedMemoryHost, SharedMemoryStore
from headrace.dataplane.stores.shm_folder import WRITER_PID, WRITER_START
from headrace.testing.data_plane import fresh_run_id

SIZES = (64, 192, 1024)


def test_the_ranges_of_kept_blocks_stay_and_all_others_are_free() -> None:
    host = SharedMemoryHost(fresh_run_id(), 8 << 20)
    pristine = copy.copy(host)
    pristine._held, pristine._quarantined = {}, []
    store = SharedMemoryStore(host.spec)
    generator, kept = random.Random(0), {}
    try:
        for first in range(1, 400, 4):
            size = generator.choice(SIZES)
            assert host.allocate(first, 4 * size)
            places = host.cut(first, [size] * generator.randint(1, 4))
            for number, place in enumerate(places):
                store.put(first + number, place, [np.full(size, (first + number) % 256, np.uint8)], [0], 1.0)
                kept[first + number] = (first + number, place, size)
            if generator.random() < 0.5:
                gone = first + generator.randrange(len(places))
                host.free(gone, b"")
                del kept[gone]
        assert host.allocate(900, 640) is not None  # The put of this reservation was not committed.
        busy = host.allocate(901, 640)
        assert busy is not None
        writer = (os.getpid(), process_start(os.getpid()))
        store._slots[_LOCATION.unpack(busy)[0], WRITER_PID : WRITER_START + 1] = writer  # It is being written now.
        after = copy.copy(pristine)
        after.adopt(list(kept.values()), 1000)
        assert after.unfreed_bytes() == 640
        taken = [store.offset_of(place) for _, place, _ in kept.values()]
        held = [range(at, at + size) for at, (_, _, size) in zip(taken, kept.values(), strict=True)]
        held.append(range(store.offset_of(busy), store.offset_of(busy) + 640))
        for block_id in range(1000, 1200):
            place = after.allocate(block_id, 192)
            assert place is not None
            at = store.offset_of(place)
            assert not any(span.start < at + 192 and at < span.stop for span in held)
            held.append(range(at, at + 192))
        wants = [Want(BlockRef(number, place, layout(size)), (0,)) for number, place, size in kept.values()]
        for (block_id, _, _), found in zip(kept.values(), store.get(wants, 1.0), strict=True):
            assert (found[0] == block_id % 256).all()
        after.close()  # It does not own the pool.
        store.settle(wants)
    finally:
        host.close()


def layout(size: int) -> BlockLayout:
    return BlockLayout(("ids",), 1, 0, (size,))
