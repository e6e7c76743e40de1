"""`python tools/measure/weights_gpu.py` compares the transfer plan between GPUs with the wire and one sender.

    wire        a plain send and receive of buckets of the plan's sizes, between its pairs, all at once
    plan        N trainer ranks with fsdp's rows send to an engine of N workers with vLLM's tensor-parallel parts
    one sender  rank 0 gathers the weights and broadcasts them (`collective`), and each worker takes everything

Each rank and each worker has a GPU. With `--colocated`, each GPU has a rank and a worker: there is no wire to compare
with, the one sender's transport is `ipc`, and each row is another model or layout. `--device cpu` runs the same code
over gloo and shared memory. The weights are random bytes that differ in each version. After every update, each worker's
weights are compared with them byte for byte.
"""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from headrace.actors.weight_sync.pairs.neighbour_receiver import NeighbourReceiver
from headrace.actors.weight_sync.pairs.neighbour_sender import NeighbourSender
from headrace.actors.weight_sync.pairs.pair_sender import KIND, SLOTS, location_of
from headrace.actors.weight_sync.plan.regions import Party, Region, held
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig, WeightUpdate
from headrace.bench.models import SHAPES
from headrace.bench.records import conditions, table, write_records, write_summary
from headrace.bench.weights.peers import Peer, call_all
from headrace.cli.arguments import Parser, expect_gpus, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import show_results, status_line
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.plan.weight_layouts import gated_experts
from headrace.trainers.backends.weight_stream import Cut, Piece, SpreadWeight, stream_weights

TIMEOUT_S = 120.0
SIZES = ("30b-a3b", "4b", "2g", "tiny-moe", "tiny")
REPEATS = 3
CASES = ("wire", "plan", "one sender")
_SYNC = SyncConfig(staging="full", timeout_s=TIMEOUT_S)
_ROOM = 0.85
"""Share of a GPU's free memory that weights may take."""
_PARTS = {
    "send": "all",
    "_meet": "start",
    "_stream": "buckets",
    "_await_room": "wait for the worker",
    "_hand_over": "wait for packing and exchange",
}
"""Methods of a sender that are measured. The last two are part of `buckets`; what `all` has more is the end."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A model, and what trainer ranks and engine workers have of it.

    It is `whole`, `rows` of every weight, `ep` (experts by rank, the rest whole), or `tp` (vLLM's tensor-parallel
    parts)."""

    size: str
    trainers: str = "rows"
    engine: str = "tp"
    name: str = ""
    colocated: bool = False


COLOCATED = (
    Layout("2g", "whole", "whole", "dp", colocated=True),
    Layout("4b", "whole", "whole", "dp", colocated=True),
    Layout("4b", "rows", "whole", "fsdp", colocated=True),
    Layout("30b-a3b", "rows", "ep", "ep", colocated=True),
)
"""On one GPU, only the first two differ."""


def shapes_of(size: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a Qwen3 model, with stacked experts if any, by its Hugging Face name."""
    of = SHAPES[size]
    hidden, width, queries, keys = of.hidden, of.expert_intermediate, of.heads * of.head_dim, of.key_value_heads
    mlp = {
        "mlp.gate.weight": (of.experts, hidden),
        "mlp.experts.gate_up_proj": (of.experts, 2 * width, hidden),
        "mlp.experts.down_proj": (of.experts, hidden, width),
    }
    if not of.experts:
        rows = {"gate": (of.intermediate, hidden), "up": (of.intermediate, hidden), "down": (hidden, of.intermediate)}
        mlp = {f"mlp.{name}_proj.weight": shape for name, shape in rows.items()}
    within = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys * of.head_dim, hidden),
        "self_attn.v_proj.weight": (keys * of.head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (of.head_dim,),
        "self_attn.k_norm.weight": (of.head_dim,),
        **mlp,
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    named = {f"model.layers.{layer}.{name}": one for layer in range(layers) for name, one in within.items()}
    ends = {"model.norm.weight": (hidden,)} | ({} if of.tied else {"lm_head.weight": (of.vocabulary, hidden)})
    return {"model.embed_tokens.weight": (of.vocabulary, hidden)} | named | ends


def bytes_of(shapes: Shapes) -> int:
    """Return the number of bytes of the weights in bfloat16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def _axis(layout: str, name: str) -> int | None:
    """Return the axis along which a weight is cut; None for one that each process has whole."""
    if layout == "rows" or (layout == "ep" and ".experts." in name):
        return 0
    if layout != "tp" or "norm" in name or name.endswith("mlp.gate.weight"):
        return None
    return 2 if name.endswith("experts.down_proj") else 1 if "o_proj" in name or "down_proj" in name else 0


def _is_gated(layout: str, name: str) -> bool:
    return layout == "tp" and name.endswith("gate_up_proj")


def regions_of(layout: str, shapes: Shapes, num: int, rank: int) -> Iterator[Region]:
    """Yield the regions that rank `rank` of `num`, or such a worker, has."""
    for name, shape in shapes.items():
        axis = _axis(layout, name)
        if _is_gated(layout, name):
            yield from gated_experts(name, shape, (0, shape[0]), num, rank, name)
        else:
            yield from held(name, shape, [] if axis is None else [(axis, num, rank)])


def part_of(layout: str, name: str, whole: torch.Tensor, num: int, rank: int) -> torch.Tensor:
    """Return that process's part of a weight, cut by torch."""
    axis = _axis(layout, name)
    if _is_gated(layout, name):
        return torch.cat([half.chunk(num, 1)[rank] for half in whole.chunk(2, 1)], 1)
    return whole if axis is None else whole.chunk(num, axis)[rank].contiguous()


def bytes_at(layout: str, shapes: Shapes, num: int) -> int:
    """Return the number of bytes that a process has of the weights."""
    return sum(
        2 * torch.Size(shape).numel() // (1 if _axis(layout, name) is None else num) for name, shape in shapes.items()
    )


def plan_of(layout: Layout, shapes: Shapes, num: int, bucket_bytes: int) -> TransferPlan:
    """Return the plan from `num` ranks to `num` workers. bucket_bytes: memory for buckets of a process."""
    senders, receivers = (
        [Party(f"{place} {rank}", tuple(regions_of(kind, shapes, num, rank))) for rank in range(num)]
        for kind, place in ((layout.trainers, "gpu"), (layout.engine, "gpu" if layout.colocated else "engine"))
    )
    specs = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    return plan_transfer(specs, senders, receivers, bucket_bytes // SLOTS)


class TimedSender(NeighbourSender):
    """Sender that measures the parts of its updates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: dict[str, float] = defaultdict(float)
        for method, part in _PARTS.items():
            setattr(self, method, partial(self._timed, part, getattr(self, method)))

    def _timed(self, part: str, call: Callable[..., Any], *args: Any) -> Any:
        if part == "all":
            self.seconds.clear()
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds[part] += time.perf_counter() - start


class Member:
    """One process of the measurement: trainer rank `rank`, or worker `rank - num` of the engine."""

    def __init__(self, rank: int, num: int, device: str, key: bytes, layout: Layout) -> None:
        self.rank, self.num, self.device, self._key, self._layout = rank, num, torch.device(device), key, layout
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._place, self._trains = rank % num, rank < num
        self._kind = layout.trainers if self._trains else layout.engine
        self._gpu = "" if self.device.type == "cuda" else f"gpu {self._place}"
        self._parts: dict[str, torch.Tensor] = {}
        self._stack = ExitStack()

    def room(self) -> int:
        """Return the number of bytes that the weights may take in the memory of this process."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 30
        return int(_ROOM * free)

    def ready(self, layers: int, bucket_bytes: int) -> str:
        """Prepare both ways to send. Returns the address of a sender; "" for a worker."""
        self._shapes, self._bucket_bytes = shapes_of(self._layout.size, layers), bucket_bytes
        self._plan = plan_of(self._layout, self._shapes, self.num, bucket_bytes)
        colocated = self._layout.colocated
        if not self._trains:
            own = "engine", self._place, self._key, self.device
            self._receiver = NeighbourReceiver(*own, self._gpu) if colocated else GroupReceiver(*own)
            config = ReceiverConfig("engine", _SYNC, str(self.device), key=self._key)
            self._inbox = WeightInbox(config, self._place)
            self._stack.callback(self._inbox.close)
            self._stack.callback(self._receiver.leave)
            return ""
        own = self._place, "127.0.0.1", self._key, TIMEOUT_S, self.device
        self._sender = TimedSender(*own, self._gpu) if colocated else GroupSender(*own)
        self._stack.callback(self._sender.close)
        if self._place == 0:
            config = SenderConfig(f"bench-{os.getpid()}", _SYNC, device=str(self.device), key=self._key)
            sender = build_sender("ipc" if colocated else "collective", config)
            self._publisher = WeightPublisher(sender, _SYNC, bucket_bytes)
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
        """Give a trainer its part of a version, and a worker memory without any."""
        for name, whole in self._whole(version):
            part = part_of(self._kind, name, whole, self.num, self._place)
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
        if not self._trains:
            self._receiver.staying = self._parts
        end = self._sender.send if self._trains else self._receiver.receive
        end(update, self._plan, self._place, self._parts)
        self._wait()

    def seconds(self) -> dict[str, float]:
        """Return the parts of the last update by plan, if they are measured."""
        return dict(self._sender.seconds) if isinstance(self._sender, TimedSender) else {}

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
        pieces = (Piece(0),) if self._kind == "whole" else pieces
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
                got, expected = self._parts[name], part_of(self._kind, name, whole, self.num, self._place)
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

    def __init__(self, stack: ExitStack, layout: Layout, num: int, device: str, bucket_bytes: int, layers: int) -> None:
        """num: number of ranks, and of workers. layers: layers of the model; 0 for as many as fit."""
        self._layout, self._num, key = layout, num, new_key()
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._peers: list[Peer] = []
        for rank in range(2 * num):
            place = f"cuda:{rank % num if layout.colocated else rank}" if device == "cuda" else "cpu"
            self._peers.append(Peer(partial(Member, rank, num, place, key, layout)))
            stack.callback(self._peers[-1].close)
        self._trainers, self._workers = self._peers[:num], self._peers[num:]
        room = min(call_all(self._peers, "room"))
        self.layers, most = layers or SHAPES[layout.size].layers, SHAPES[layout.size].layers
        while self.layers > 1 and self._room(bucket_bytes) > room:
            self.layers -= 1
        self.num_bytes = bytes_of(shapes_of(layout.size, self.layers))
        self.told = f"{layout.size}, {layout.trainers} to {layout.engine}, {self.layers} of {most} layers"
        self.told += f", {self.num_bytes / 1e9:.3g} GB"
        self._addresses = call_all(self._peers, "ready", self.layers, bucket_bytes)[:num]
        self._version = 0
        self.parts: list[dict[str, float]] = []
        """Parts of the seconds of each update by plan, those of the rank that took longest, if they are measured."""

    def _room(self, bucket_bytes: int) -> int:
        """Return the memory that a GPU needs. With one sender, a worker has all weights beside its part of them."""
        shapes = shapes_of(self._layout.size, self.layers)
        at = [bytes_at(kind, shapes, self._num) for kind in (self._layout.engine, self._layout.trainers)]
        return bytes_of(shapes) + (sum(at) if self._layout.colocated else at[0]) + 6 * bucket_bytes

    def run(self, repeats: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
        """Return the seconds of each case. The first update of a case is not counted, because it makes groups."""
        seconds: dict[str, list[float]] = {}
        cases = (2 * self._num, self._wire), (0, self._plan), (self._num, self._alone)
        for case, (world, once) in [*zip(CASES, cases, strict=True)][self._layout.colocated :]:
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
        seconds = self._update("pass_on", lambda: update, alone=False)
        self.parts.append(max(call_all(self._trainers, "seconds"), key=lambda parts: parts.get("all", 0.0)))
        return seconds

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
        for worker, names in enumerate(wrong):
            if names:
                told = f"{len(names)} weights of worker {worker} differ from the trainers', such as {names[:3]}"
                raise RuntimeError(f"{method}, version {self._version}: {told}")
        return max(end for _, end in spans) - min(start for start, _ in spans)


def summarise(name: str, seconds: Mapping[str, Sequence[float]], num_bytes: int) -> dict[str, float]:
    """Return the summary. name: such as `gpu4`, for four GPUs in all."""
    median = {case: statistics.median(each) for case, each in seconds.items()}
    plan, key = median["plan"], f"weights.plan.{name}"
    wire = {f"{key}.vs_wire": median["wire"] / plan} if "wire" in median else {}
    return {
        **wire,
        f"{key}.vs_one": median["one sender"] / plan,
        f"{key}.seconds": plan,
        f"{key}.gb_per_s": num_bytes / plan / 1e9,
    }


def weights_table(title: str, seconds: Mapping[str, Sequence[float]], num_bytes: int) -> Table:
    """Return a table with one row per case."""
    base = next(iter(seconds))
    first = statistics.median(seconds[base])
    rows = [
        (case, f"{(median := statistics.median(each)):.4f}", f"{num_bytes / median / 1e9:.2f}", f"{first / median:.2f}")
        for case, each in seconds.items()
    ]
    return table(title, ("case", "s", "GB/s", f"{base} : this"), rows, left=("case",))


def parts_line(parts: Mapping[str, float]) -> str:
    """Return the parts of an update in milliseconds, in words."""
    return ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in parts.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table for each layout, and return the exit code."""
    parser = Parser("tools/measure/weights_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4, metavar="N", help="GPUs, half of them trainers'; default: 4")
    parser.add_argument("--colocated", action="store_true", help="a trainer rank and an engine worker on each GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: processes without a GPU")
    parser.add_argument("--size", choices=SIZES, help=f"default: {SIZES[0]}; with --colocated, several")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="default: as many as fit")
    parser.add_argument("--bucket-mib", type=int, default=512, metavar="N", help="as sync.bucket_mib; default: 512")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"default: {REPEATS}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)
    return ended(lambda: measure(arguments))


def measure(arguments: Any) -> int:
    """Measure all layouts, write the results, and print them. Raises UserError if there are too few GPUs."""
    if arguments.device == "cuda":
        expect_gpus(arguments.gpus, f"--gpus: got {arguments.gpus} without --device cpu")
    out, device, colocated = results_folder(arguments, "plan"), arguments.device, arguments.colocated
    num, bucket_bytes = arguments.gpus // (1 if colocated else 2), arguments.bucket_mib << 20
    prefix = f"{'gpu' if device == 'cuda' else 'cpu'}{arguments.gpus}"
    layouts = COLOCATED[: 2 if num == 1 else None] if colocated else (Layout(SIZES[0]),)
    layouts = dict.fromkeys(replace(layout, size=arguments.size or layout.size) for layout in layouts)
    records: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    code = 0
    for layout in layouts:
        name = f"{prefix}.colocated.{layout.size}-{layout.name}" if colocated else prefix
        with status_line("starting") as (console, tell), ExitStack() as stack:
            made = Measurement(stack, layout, num, device, bucket_bytes, arguments.layers)
            seconds = made.run(arguments.repeats, tell)
        told = {"layout": made.told, "bytes": made.num_bytes, "name": name}
        records += [{**told, "case": case, "times_s": each} for case, each in seconds.items()]
        summary |= summarise(name, seconds, made.num_bytes)
        shown = weights_table(f"{name}: {made.told}", seconds, made.num_bytes)
        if made.parts[-1]:
            records.append({**told, "case": "parts of the plan", "seconds": made.parts[1:]})
            shown.caption = parts_line(made.parts[-1])
        facts = conditions(bucket_bytes=bucket_bytes, verified=True)  # Results that are there are not lost later.
        out.mkdir(parents=True, exist_ok=True)
        write_records(out / "results.jsonl", records, facts)
        write_summary(out / "summary.json", summary, facts)
        code = show_results(console, shown, out)
    return code


if __name__ == "__main__":
    sys.exit(main())
