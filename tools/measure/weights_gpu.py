"""`python tools/measure/weights_gpu.py` compares the transfer plan between GPUs with the wire and one sender.

    wire        a plain send and receive of buckets of the plan's sizes, between its pairs, all at once
    plan        N trainer ranks with fsdp's rows send to an engine of N workers with vLLM's tensor-parallel parts
    one sender  rank 0 gathers the weights and broadcasts them (`collective`), and each worker takes everything

Each rank and each worker has a GPU; `--device cpu` runs the same code over gloo. The weights are random bytes that
differ in each version. After every update, each worker's weights are compared with them byte for byte.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.pairs.group_receiver import GroupReceiver
from headrace.actors.weight_sync.pairs.group_sender import GroupSender
from headrace.actors.weight_sync.pairs.pair_sender import KIND, SLOTS, location_of
from headrace.actors.weight_sync.plan.layouts import gated_experts, held
from headrace.actors.weight_sync.plan.regions import Party, Region
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig, WeightUpdate
from headrace.bench.models import SHAPES
from headrace.bench.records import conditions, table, write_records, write_summary
from headrace.bench.weights.peers import Peer, call_all
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import show_results, status_line
from headrace.dataplane.security.handshake import new_key
from headrace.trainers.backends.weight_stream import Cut, Piece, SpreadWeight, stream_weights

TIMEOUT_S = 120.0
SIZES = ("30b-a3b", "tiny-moe")
REPEATS = 3
CASES = ("wire", "plan", "one sender")
_SYNC = SyncConfig(staging="full", timeout_s=TIMEOUT_S)
_ROOM = 0.85
"""Share of a GPU's free memory that weights may take."""
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(size: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a Qwen3 model with stacked experts, by its Hugging Face name."""
    of = SHAPES[size]
    hidden, width, queries, keys = of.hidden, of.expert_intermediate, of.heads * of.head_dim, of.key_value_heads
    within = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys * of.head_dim, hidden),
        "self_attn.v_proj.weight": (keys * of.head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (of.head_dim,),
        "self_attn.k_norm.weight": (of.head_dim,),
        "mlp.gate.weight": (of.experts, hidden),
        "mlp.experts.gate_up_proj": (of.experts, 2 * width, hidden),
        "mlp.experts.down_proj": (of.experts, hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    named = {f"model.layers.{layer}.{name}": one for layer in range(layers) for name, one in within.items()}
    ends = {"model.norm.weight": (hidden,), "lm_head.weight": (of.vocabulary, hidden)}
    return {"model.embed_tokens.weight": (of.vocabulary, hidden)} | named | ends


def bytes_of(shapes: Shapes) -> int:
    """Return the number of bytes of the weights in bfloat16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def _axis(name: str) -> int | None:
    """Return the axis along which vLLM cuts a weight; None for one that each worker has whole."""
    if "norm" in name or name.endswith("gate.weight"):
        return None
    return 2 if name.endswith("down_proj") else 1 if "o_proj" in name else 0


def engine_regions(shapes: Shapes, num: int, rank: int) -> Iterator[Region]:
    """Yield the regions that worker `rank` of a tensor-parallel engine has."""
    for name, shape in shapes.items():
        axis = _axis(name)
        if name.endswith("gate_up_proj"):
            yield from gated_experts(name, shape, (0, shape[0]), num, rank, name)
        else:
            yield from held(name, shape, [] if axis is None else [(axis, num, rank)])


def engine_part(name: str, whole: torch.Tensor, num: int, rank: int) -> torch.Tensor:
    """Return that worker's part of a weight, cut by torch."""
    axis = _axis(name)
    if name.endswith("gate_up_proj"):
        return torch.cat([half.chunk(num, 1)[rank] for half in whole.chunk(2, 1)], 1)
    return whole if axis is None else whole.chunk(num, axis)[rank].contiguous()


def plan_of(shapes: Shapes, num: int, bucket_bytes: int) -> TransferPlan:
    """Return the plan from `num` ranks with rows to `num` workers. bucket_bytes: memory for buckets of a process."""
    rows = [
        tuple(one for name, shape in shapes.items() for one in held(name, shape, [(0, num, rank)]))
        for rank in range(num)
    ]
    senders = [Party(f"trainer {rank}", regions) for rank, regions in enumerate(rows)]
    receivers = [Party(f"engine {rank}", tuple(engine_regions(shapes, num, rank))) for rank in range(num)]
    specs = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    return plan_transfer(specs, senders, receivers, bucket_bytes // SLOTS)


class Member:
    """One process of the measurement: trainer rank `rank`, or worker `rank - num` of the engine."""

    def __init__(self, rank: int, num: int, device: str, key: bytes) -> None:
        self.rank, self.num, self.device, self._key = rank, num, torch.device(device), key
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._place, self._trains = rank % num, rank < num
        self._parts: dict[str, torch.Tensor] = {}
        self._stack = ExitStack()

    def room(self) -> int:
        """Return the number of bytes that the weights may take in the memory of this process."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 30
        return int(_ROOM * free)

    def ready(self, size: str, layers: int, bucket_bytes: int) -> str:
        """Prepare both ways to send. Returns the address of a sender; "" for a worker."""
        self._shapes, self._bucket_bytes = shapes_of(size, layers), bucket_bytes
        self._plan = plan_of(self._shapes, self.num, bucket_bytes)
        if not self._trains:
            self._receiver = GroupReceiver("engine", self._place, self._key, self.device)
            config = ReceiverConfig("engine", _SYNC, str(self.device), key=self._key)
            self._inbox = WeightInbox(config, self._place)
            self._stack.callback(self._inbox.close)
            self._stack.callback(self._receiver.leave)
            return ""
        self._sender = GroupSender(self._place, "127.0.0.1", self._key, TIMEOUT_S, self.device)
        self._stack.callback(self._sender.close)
        if self._place == 0:
            config = SenderConfig("bench-plan", _SYNC, device=str(self.device), key=self._key)
            self._publisher = WeightPublisher(build_sender("collective", config), _SYNC, bucket_bytes)
            self._stack.callback(self._publisher.close)
        return self._sender.address

    def _whole(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight of a version, one after the other."""
        generator = torch.Generator(self.device)
        for number, (name, shape) in enumerate(self._shapes.items()):
            generator.manual_seed(version << 20 | number)
            bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16, device=self.device)
            yield name, bits.view(torch.bfloat16)

    def change(self, version: int) -> None:
        """Give a trainer its rows of a version, and a worker memory without any."""
        for name, whole in self._whole(version):
            part = (
                whole.chunk(self.num)[self._place] if self._trains else engine_part(name, whole, self.num, self._place)
            )
            if name not in self._parts:
                self._parts[name] = torch.empty_like(part, memory_format=torch.contiguous_format)
            self._parts[name].copy_(part) if self._trains else self._parts[name].fill_(-1.0)
        self._wait()

    # ---------------- These methods are the cases.

    def join(self, path: str, world: int) -> None:
        """Join the default process group of the first `world` processes."""
        kind, timeout = "nccl" if self.device.type == "cuda" else "gloo", datetime.timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(kind, store=FileStore(path, world), rank=self.rank, world_size=world, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device=self.device))

    def leave(self) -> None:
        """Leave the default process group."""
        dist.destroy_process_group()

    def wire(self) -> float:
        """Send or receive buckets of the plan's sizes between its pairs, all at once, and return the seconds."""
        sizes: dict[int, list[int]] = defaultdict(list)
        buckets = self._plan.sending(self._place) if self._trains else self._plan.taking(self._place)
        for bucket in buckets:
            sizes[self.num + bucket.receiver if self._trains else bucket.sender].append(bucket.nbytes)
        memory = {peer: torch.ones(max(each), dtype=torch.uint8, device=self.device) for peer, each in sizes.items()}
        way: Callable[..., Any] = dist.isend if self._trains else dist.irecv
        dist.all_reduce(torch.zeros(1, device=self.device))
        self._wait()
        start = time.perf_counter()
        for some in itertools.zip_longest(*sizes.values()):
            found = zip(memory, some, strict=True)
            parts = [dist.P2POp(way, memory[peer][:nbytes], peer) for peer, nbytes in found if nbytes]
            for work in dist.batch_isend_irecv(parts):
                work.wait()
        self._wait()
        return time.perf_counter() - start

    def pass_on(self, update: WeightUpdate) -> None:
        """Send or take this process's part of the plan."""
        end = self._sender.send if self._trains else self._receiver.receive
        end(update, self._plan, self._place, self._parts)
        self._wait()

    def open(self, version: int) -> WeightUpdate:
        """Announce a version that rank 0 sends alone."""
        specs = {name: (torch.bfloat16, shape) for name, shape in self._shapes.items()}
        return self._publisher.open(version, specs, [ReceiverGroup("engine", self.num)])

    def alone(self, update: WeightUpdate) -> None:
        """Gather the weights and broadcast them, or take all of them."""
        if not self._trains:
            self._inbox.prepare(update)
            return self._wait()
        pieces = tuple(Piece(rank, (Cut(0, self.num, rank),)) for rank in range(self.num))
        spread = [SpreadWeight(name, torch.bfloat16, shape, pieces) for name, shape in self._shapes.items()]
        stream = stream_weights(spread, lambda weight: self._parts[weight.name], self._place, self.device)
        if self._place == 0:
            self._publisher.publish(update, stream)
        else:
            for _ in stream:
                pass

    def wrong(self, version: int, alone: bool) -> list[str]:
        """Return the names of a worker's weights that differ from those of a version."""
        found: list[str] = []
        staged = self._inbox.staged
        for name, whole in self._whole(version):
            if alone:
                assert staged is not None
                got, expected = staged.named[name], whole
            else:
                got, expected = self._parts[name], engine_part(name, whole, self.num, self._place)
            if not torch.equal(got.view(torch.int16), expected.view(torch.int16)):
                found.append(name)
        if alone:
            self._inbox.committed(version)
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._stack.close()


class Measurement:
    """Processes of trainers and engine workers, and the seconds of their updates."""

    def __init__(self, stack: ExitStack, num: int, device: str, size: str, bucket_bytes: int, layers: int) -> None:
        """layers: layers of the model; 0 for as many as fit."""
        self._num, key = num, new_key()
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._peers: list[Peer] = []
        for rank in range(2 * num):
            place = f"cuda:{rank}" if device == "cuda" else "cpu"
            self._peers.append(Peer(partial(Member, rank, num, place, key)))
            stack.callback(self._peers[-1].close)
        self._trainers, self._workers = self._peers[:num], self._peers[num:]
        room = min(call_all(self._peers, "room"))
        self.layers, most = layers or SHAPES[size].layers, layers or SHAPES[size].layers
        # With one sender, a worker has all weights beside its part of them.
        while self.layers > 1 and bytes_of(shapes_of(size, self.layers)) * (1 + 1 / num) + 4 * bucket_bytes > room:
            self.layers -= 1
        self.num_bytes = bytes_of(shapes_of(size, self.layers))
        self.told = f"{self.layers} of {most} layers, {self.num_bytes / 1e9:.3g} GB"
        self._addresses = call_all(self._peers, "ready", size, self.layers, bucket_bytes)[:num]
        self._version = 0

    def run(self, repeats: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
        """Return the seconds of each case. The first update of a case is not counted, because it makes groups."""
        seconds: dict[str, list[float]] = {}
        for case, world, once in zip(
            CASES, (2 * self._num, 0, self._num), (self._wire, self._plan, self._alone), strict=True
        ):
            tell(f"{case}, {self.told}")
            if world:
                call_all(self._peers[:world], "join", str(Path(self._folder) / case.replace(" ", "-")), world)
            seconds[case] = [once() for _ in range(repeats + 1)][1:]
            if world:
                call_all(self._peers[:world], "leave")
        return seconds

    def _wire(self) -> float:
        return max(call_all(self._peers, "wire"))

    def _plan(self) -> float:
        self._version += 1
        location, groups = location_of(self._version, self._addresses), (ReceiverGroup("engine", self._num),)
        update = WeightUpdate(self._version, None, KIND, location, self.num_bytes, groups, TIMEOUT_S)
        return self._update("pass_on", lambda: update, alone=False)

    def _alone(self) -> float:
        self._version += 1
        return self._update("alone", lambda: self._peers[0].call("open", self._version)[0], alone=True)

    def _update(self, method: str, announced: Callable[[], WeightUpdate], *, alone: bool) -> float:
        call_all(self._peers, "change", self._version)
        update = announced()
        for peer in self._peers:
            peer.start(method, update)
        spans = [peer.answer()[1] for peer in self._peers]
        wrong = call_all(self._workers, "wrong", self._version, alone)
        if any(wrong):
            raise RuntimeError(f"{method}: these weights of the workers differ from the trainers': {wrong}")
        return max(end for _, end in spans) - min(start for start, _ in spans)


def summarise(name: str, seconds: Mapping[str, Sequence[float]], num_bytes: int) -> dict[str, float]:
    """Return the summary. name: such as `gpu4`, for four GPUs in all."""
    wire, plan, one = (statistics.median(seconds[case]) for case in CASES)
    key = f"weights.plan.{name}"
    return {
        f"{key}.vs_wire": wire / plan,
        f"{key}.vs_one": one / plan,
        f"{key}.seconds": plan,
        f"{key}.gb_per_s": num_bytes / plan / 1e9,
    }


def weights_table(title: str, seconds: Mapping[str, Sequence[float]], num_bytes: int) -> Table:
    """Return a table with one row per case."""
    wire = statistics.median(seconds["wire"])
    rows = [
        (case, f"{(median := statistics.median(each)):.4f}", f"{num_bytes / median / 1e9:.2f}", f"{wire / median:.2f}")
        for case, each in seconds.items()
    ]
    return table(title, ("case", "s", "GB/s", "wire : this"), rows, left=("case",))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit code."""
    parser = Parser("tools/measure/weights_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4, metavar="N", help="GPUs, half of them trainers'; default: 4")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: processes without a GPU")
    parser.add_argument("--size", default=SIZES[0], choices=SIZES, help=f"default: {SIZES[0]}")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="default: as many as fit")
    parser.add_argument("--bucket-mib", type=int, default=512, metavar="N", help="as sync.bucket_mib; default: 512")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"default: {REPEATS}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)

    def run() -> int:
        out, device = results_folder(arguments, "plan"), arguments.device
        with status_line("starting") as (console, tell), ExitStack() as stack:
            bucket_bytes = arguments.bucket_mib << 20
            made = Measurement(stack, arguments.gpus // 2, device, arguments.size, bucket_bytes, arguments.layers)
            seconds = made.run(arguments.repeats, tell)
        name = f"{'gpu' if device == 'cuda' else 'cpu'}{arguments.gpus}"
        facts = conditions(
            size=arguments.size, layers=made.layers, bytes=made.num_bytes, bucket_bytes=bucket_bytes, verified=True
        )
        out.mkdir(parents=True, exist_ok=True)
        write_records(out / "results.jsonl", [{"case": case, "times_s": each} for case, each in seconds.items()], facts)
        write_summary(out / "summary.json", summarise(name, seconds, made.num_bytes), facts)
        return show_results(console, weights_table(f"{name}, {made.told}", seconds, made.num_bytes), out)

    return ended(run)


if __name__ == "__main__":
    sys.exit(main())
