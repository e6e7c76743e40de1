"""Ranks of a torchrun job share a data plane: rank 0 opens it and puts rows, and all of them stream what they get.

torchrun --nproc-per-node 2 examples/stream_rows.py
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from headrace import Field, Kind, Schema, StreamingDataset, connect, open_data_plane

ROWS = 64
SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])


def main() -> None:
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        texts = [""]
        if dist.get_rank() == 0:
            plane = stack.enter_context(open_data_plane(process=True))
            texts = [plane.handle.to_text()]
            client = stack.enter_context(connect(plane.handle))
            client.register("train", SCHEMA)
            ids = [torch.arange(1 + number % 7) for number in range(ROWS)]
            client.put(
                "train", [f"r.{number}" for number in range(ROWS)], {"ids": ids, "reward": torch.arange(float(ROWS))}
            )
        dist.broadcast_object_list(texts)
        # With rank and world, each rank gets equally many batches, so that no rank waits in a collective for ever.
        rows = StreamingDataset(
            texts[0], "train", "trainer", ["ids", "reward"], batch_size=8, stop_after=ROWS, timeout_s=30.0,
            rank=dist.get_rank(), world=dist.get_world_size(),
        )  # fmt: skip
        seen, steps = torch.zeros(ROWS), 0
        for batch in DataLoader(rows, batch_size=None, num_workers=1):
            seen[batch["reward"].long()] += 1
            steps += 1
            dist.barrier()  # Where the gradients of a step would be averaged.
        print(f"rank {dist.get_rank()} streamed {int(seen.sum())} rows in {steps} steps", flush=True)
        assert steps == len(rows), "each rank gets the same number of batches"
        dist.all_reduce(seen)
        assert seen.eq(1).all(), "each row goes to one rank, once"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
