"""Checks the transfer plan by brute force: random layouts are planned, and the copies carried out on tiny tensors."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from headrace.actors.weight_sync.plan.packing import Unpacker, pack, unpack
from headrace.actors.weight_sync.plan.regions import Party, Region, Specs, held, lengths
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_key, plan_transfer
from headrace.codecs.weights.gpu_scatter import device_digest
from headrace.tests.actors.weight_sync.plan.weight_layouts import (
    Heads,
    expert_boxes,
    fused_heads,
    gated,
    gated_experts,
    grouped_heads,
    vocabulary,
)

VOCAB, HIDDEN, EXPERTS, ROWS = 70, 12, 8, 8
QKV = ("q.weight", "k.weight", "v.weight")
SPECS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed": (torch.bfloat16, (VOCAB, HIDDEN)),
    "norm": (torch.bfloat16, (HIDDEN,)),
    "scale": (torch.float32, ()),
    "q.weight": (torch.bfloat16, (16, HIDDEN)),
    "k.weight": (torch.bfloat16, (8, HIDDEN)),
    "v.weight": (torch.bfloat16, (8, HIDDEN)),
    "o": (torch.bfloat16, (HIDDEN, 16)),
    "gate": (torch.bfloat16, (16, HIDDEN)),
    "up": (torch.bfloat16, (16, HIDDEN)),
    "down": (torch.bfloat16, (HIDDEN, 16)),
    "experts.gate_up": (torch.bfloat16, (EXPERTS, 2 * ROWS, HIDDEN)),
    "experts.down": (torch.bfloat16, (EXPERTS, HIDDEN, ROWS)),
    "bias": (torch.float32, (EXPERTS,)),
}
HEADS = Heads(QKV, 8, 4, 2, (HIDDEN,))
WHOLE = ("norm", "scale", "bias")
Layout = tuple[int, Callable[[int], Iterator[Region]]]
"""Number of ranks, and the function that yields the regions of one."""


def fsdp(num: int, tp: int = 1, ep: int = 1) -> Layout:
    def regions(rank: int) -> Iterator[Region]:
        for name, (_, shape) in SPECS.items():
            if not shape or name == "bias":
                yield from held(name, shape)
            elif "experts." in name and ep > 1:
                yield from held(name, shape, [(0, ep, rank % ep), (0, num * tp // ep, rank // ep)])
            else:
                axis = 1 if name in ("o", "down") else 0
                split = [(axis, tp, rank % tp)] if name not in WHOLE and tp > 1 and len(shape) == 2 else []
                yield from held(name, shape, [*split, (0, num, rank // tp)])

    return num * tp, regions


def megatron(tp: int, ep: int, etp: int, dp: int) -> Layout:
    def regions(rank: int) -> Iterator[Region]:
        mine = rank % tp
        expert, part = divmod(rank % (ep * etp), etp)
        size = EXPERTS // ep
        for name in WHOLE:
            yield from held(name, SPECS[name][1])
        yield from vocabulary("embed", SPECS["embed"][1], tp, mine)
        yield from grouped_heads(HEADS, tp, mine, "linear_qkv")
        yield from gated("gate", "up", SPECS["gate"][1], tp, mine, "linear_fc1")
        for name in ("o", "down"):
            yield from held(name, SPECS[name][1], [(1, tp, mine)])
        experts = (expert * size, (expert + 1) * size)
        yield from gated_experts("experts.gate_up", SPECS["experts.gate_up"][1], experts, etp, part, "weight1")
        yield from held("experts.down", SPECS["experts.down"][1], [(0, ep, expert), (2, etp, part)], "weight2")

    return math.lcm(tp, ep * etp) * dp, regions


def unstacked(num: int) -> Layout:
    """Every rank has whole experts as separate tensors, and a copy of the rest."""

    def regions(rank: int) -> Iterator[Region]:
        mine = [expert for expert in range(EXPERTS) if expert % num == rank]
        for name, (_, shape) in SPECS.items():
            if "experts." not in name:
                yield from held(name, shape)
        shape = SPECS["experts.gate_up"][1]
        for rows, part in (((0, ROWS), "gate_proj"), ((ROWS, 2 * ROWS), "up_proj")):
            yield from expert_boxes("experts.gate_up", shape, rows, {expert: f"{expert}.{part}" for expert in mine})
        names = {expert: f"{expert}.down_proj" for expert in mine}
        yield from expert_boxes("experts.down", SPECS["experts.down"][1], (0, HIDDEN), names)

    return num, regions


def vllm(tp: int, *, ep: bool) -> Layout:
    def regions(rank: int) -> Iterator[Region]:
        for name in WHOLE:
            yield from held(name, SPECS[name][1])
        for name in ("embed", "lm_head"):  # They are tied.
            yield from vocabulary("embed", SPECS["embed"][1], tp, rank, 64, name)
        yield from fused_heads(HEADS, tp, rank, "qkv_proj")
        yield from gated("gate", "up", SPECS["gate"][1], tp, rank, "gate_up_proj")
        for name in ("o", "down"):
            yield from held(name, SPECS[name][1], [(1, tp, rank)])
        size = EXPERTS // tp
        experts = (rank * size, (rank + 1) * size) if ep else (0, EXPERTS)
        part = (1, 0) if ep else (tp, rank)
        yield from gated_experts("experts.gate_up", SPECS["experts.gate_up"][1], experts, *part, "w13")
        yield from held("experts.down", SPECS["experts.down"][1], [(0, tp, rank) if ep else (2, tp, rank)], "w2")

    return tp, regions


def parties(layout: Layout, host: Callable[[int], str], device: Callable[[int], str] = lambda rank: "") -> list[Party]:
    num, regions = layout
    return [Party(host(rank), tuple(regions(rank)), device(rank)) for rank in range(num)]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SPECS.items()}


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor.as_strided(lengths(region.box), region.strides, region.offset)


def empty_tensors(party: Party, fill: float, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    sizes: dict[str, int] = defaultdict(int)
    for region in party.regions:
        last = sum((size - 1) * stride for size, stride in zip(lengths(region.box), region.strides, strict=True))
        sizes[region.tensor] = max(sizes[region.tensor], region.offset + last + 1)
    dtypes = {region.tensor: dtype or SPECS[region.weight][0] for region in party.regions}
    return {name: torch.full((size,), fill, dtype=dtypes[name]) for name, size in sizes.items()}


def filled(party: Party, source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = empty_tensors(party, -7.0)
    for region in party.regions:
        box = tuple(slice(start, stop) for start, stop in region.box)
        view(tensors[region.tensor], region).copy_(source[region.weight][box])
    return tensors


def carry_out(plan: TransferPlan, senders: Sequence[Party], receivers: Sequence[Party], limit: int) -> None:
    """Carry out the plan, and check that each receiver has each byte that it needs, written once, and nothing else."""
    source = weights(1)
    payloads: dict[int, torch.Tensor] = {}
    for rank, party in enumerate(senders):
        tensors = filled(party, source)
        for bucket in plan.sending(rank):
            assert bucket.nbytes <= limit
            payloads[bucket.number] = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
            pack(bucket, tensors, payloads[bucket.number])
    assert sorted(payloads) == list(range(len(plan.buckets.sender)))
    readers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, party in enumerate(receivers):
        tensors, times = empty_tensors(party, -7.0), empty_tensors(party, 0.0)
        taken = plan.taking(rank)
        assert {bucket.number for bucket in taken} >= set(np.flatnonzero(plan.buckets.receiver == rank).tolist())
        for bucket in taken:
            assert receivers[bucket.receiver].host == party.host
            if bucket.receiver != rank:
                readers[bucket.receiver, bucket.number].append(rank)
            unpack(bucket, payloads[bucket.number], tensors)
            for move in bucket.moves:
                times[move.tensor].as_strided(move.shape, move.strides, move.offset).add_(1)
        expected, once = filled(party, source), empty_tensors(party, 0.0)
        for region in party.regions:
            view(once[region.tensor], region).fill_(1)
        in_one_pass = empty_tensors(party, -7.0)
        unpacker, staying = Unpacker(), [*in_one_pass][::2]
        for _ in range(2):  # The second time by what was kept.
            for tensor in in_one_pass.values():
                tensor.fill_(-7.0)
            for bucket in taken:
                payload = payloads[bucket.number]
                assert unpacker.take(plan.key, bucket, payload, in_one_pass, staying) == device_digest(payload)
        for name, tensor in tensors.items():
            assert tensor.view(torch.uint8).equal(expected[name].view(torch.uint8)), name
            assert times[name].equal(once[name]) and in_one_pass[name].equal(tensor), name
    passing = {
        (rank, number): [*ranks] for rank in range(len(receivers)) for number, ranks in plan.passing(rank).items()
    }
    assert passing == readers


def needed_bytes(party_regions: Sequence[Region]) -> int:
    """Return the number of bytes of all that these regions cover, each byte counted once."""
    masks = {name: np.zeros(shape, bool) for name, (_, shape) in SPECS.items()}
    for region in party_regions:
        masks[region.weight][tuple(slice(start, stop) for start, stop in region.box)] = True
    return sum(int(mask.sum()) * SPECS[name][0].itemsize for name, mask in masks.items())


TRAINERS = [
    lambda pick: fsdp(pick.choice([1, 2, 3, 5, 8])),
    lambda pick: fsdp(pick.choice([1, 3]), tp=2),
    lambda pick: fsdp(pick.choice([4, 8]), ep=pick.choice([2, 4])),
    lambda pick: megatron(pick.choice([1, 2, 4]), pick.choice([1, 2, 4]), pick.choice([1, 2, 4]), pick.choice([1, 2])),
    lambda pick: unstacked(pick.choice([2, 3])),
]


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_are_copied_exactly(seed: int) -> None:
    pick = random.Random(seed)
    trainer = TRAINERS[seed % len(TRAINERS)](pick)
    per_host = pick.choice([1, 2, 8])
    gpus = pick.random() < 0.5
    senders = parties(
        trainer, lambda rank: f"host{rank // per_host}", lambda rank: f"gpu{rank % per_host}" if gpus else ""
    )
    receivers: list[Party] = []
    shared = pick.random() < 0.5
    for engine in range(pick.choice([1, 2, 3])):
        layout = vllm(pick.choice([1, 2, 4, 8]), ep=pick.random() < 0.5)
        host = f"host{engine // 2}" if shared else f"far{engine // 2}"
        receivers += parties(layout, lambda rank, host=host: host, lambda rank: f"gpu{rank}" if gpus else "")
    limit = pick.choice([64, 192, 1024, 1 << 20])
    plan = plan_transfer(SPECS, senders, receivers, limit)
    carry_out(plan, senders, receivers, limit)
    again = plan_transfer(SPECS, senders, receivers, limit)
    assert again.key == plan.key
    assert [again.sending(rank) for rank in range(len(senders))] == [plan.sending(rank) for rank in range(len(senders))]
    if not shared:
        moved: dict[str, int] = defaultdict(int)
        for rank in range(len(senders)):
            for bucket in plan.sending(rank):
                moved[receivers[bucket.receiver].host] += sum(move.end - move.at for move in bucket.moves)
        for host, nbytes in moved.items():
            assert nbytes == needed_bytes([r for party in receivers if party.host == host for r in party.regions])
    else:
        assert plan.bytes_over_links.sum() <= plan.bytes_sent.sum()


def test_copies_share_the_sending_and_first_receivers_differ() -> None:
    senders = parties((6, lambda rank: iter([*fsdp(1)[1](0)])), str)
    receivers = parties((4, lambda rank: iter([*vllm(1, ep=False)[1](0)])), lambda rank: f"far{rank}")
    plan = plan_transfer(SPECS, senders, receivers, 128)
    carry_out(plan, senders, receivers, 128)
    sent, taken = plan.bytes_sent, plan.bytes_over_links
    assert sent.max() - sent.min() <= 4 * 128
    assert taken.max() == taken.min() == needed_bytes(receivers[0].regions) + padding(plan) // 4
    first = {int(s): int(r) for s, r in reversed([*zip(plan.buckets.sender, plan.buckets.receiver, strict=True)])}
    assert max(sum(to == receiver for to in first.values()) for receiver in range(4)) <= 3


def padding(plan: TransferPlan) -> int:
    buckets = [bucket for rank in range(len(plan.bytes_sent)) for bucket in plan.sending(rank)]
    return sum(bucket.nbytes - sum(move.end - move.at for move in bucket.moves) for bucket in buckets)


def test_each_receiver_of_a_host_takes_an_equal_share_of_what_all_need() -> None:
    senders = parties(fsdp(4), lambda rank: "train")
    receivers = parties((4, lambda rank: iter([*vllm(1, ep=False)[1](0)])), lambda rank: "far")
    plan = plan_transfer(SPECS, senders, receivers, 128)
    taken = plan.bytes_over_links
    assert taken.sum() == needed_bytes(receivers[0].regions) + padding(plan)
    assert taken.max() - taken.min() <= 256
    assert len({bucket.number for rank in range(4) for bucket in plan.taking(rank)}) == len(plan.buckets.sender)


def test_senders_with_fewer_choices_leave_the_copies_to_the_others() -> None:
    """Rank 0 alone has `a`, both ranks have `b`, which is as large, so rank 1 sends all of `b`."""
    specs: Specs = {"a": (torch.bfloat16, (64, 8)), "b": (torch.bfloat16, (64, 8))}
    both, one = ((*held("a", (64, 8)), *held("b", (64, 8))), (*held("b", (64, 8)),))
    plan = plan_transfer(specs, [Party("x", both), Party("y", one)], [Party("far", both)], 64)
    assert plan.bytes_sent.tolist() == [1024, 1024]


def test_a_receiver_takes_from_its_own_gpu_first_then_from_its_host() -> None:
    layout = fsdp(1)
    senders = parties((4, lambda rank: layout[1](0)), lambda rank: f"host{rank // 2}", lambda rank: f"gpu{rank % 2}")
    plan = plan_transfer(SPECS, senders, senders, 1 << 20)
    assert [*zip(plan.buckets.sender, plan.buckets.receiver, strict=True)] == [(rank, rank) for rank in range(4)]
    near = parties((2, lambda rank: layout[1](0)), lambda rank: f"host{rank}", lambda rank: "gpu7")
    plan = plan_transfer(SPECS, senders, near, 64)
    assert plan.bytes_over_links.sum() == 0
    carry_out(plan, senders, near, 64)


def test_the_key_names_the_whole_input() -> None:
    senders, receivers = parties(fsdp(2), str), parties(vllm(2, ep=True), str)
    key = plan_key(SPECS, senders, receivers, 1024)
    assert key == plan_transfer(SPECS, senders, receivers, 1024).key
    assert key != plan_key(SPECS, senders, receivers, 2048)
    assert key != plan_key(SPECS, senders, receivers[:1], 1024)
    assert key != plan_key({**SPECS, "norm": (torch.float32, (HIDDEN,))}, senders, receivers, 1024)


def test_what_nobody_has_and_what_does_not_fit_is_named() -> None:
    senders, receivers = parties(fsdp(2), str), parties(vllm(1, ep=False), str)
    with pytest.raises(ValueError, match=r"'norm': no sender has \[6:12\], which a receiver needs"):
        plan_transfer(
            {**SPECS}, [senders[0], Party("1", senders[1].regions[:1])], [Party("2", (*held("norm", (12,)),))], 64
        )
    with pytest.raises(ValueError, match="receiver 0 has a region of 'other', which no spec lists"):
        plan_transfer(SPECS, senders, [Party("0", (*held("other", (4,)),))], 64)
    with pytest.raises(ValueError, match=r"sender 0 has the box .* of 'norm', which has shape \(12,\)"):
        plan_transfer(SPECS, [Party("0", (*held("norm", (13,)),))], receivers, 64)
    with pytest.raises(ValueError, match="bucket_bytes: got 100, expected a positive multiple of 64"):
        plan_transfer(SPECS, senders, receivers, 100)


def test_no_receivers_and_empty_parts_make_an_empty_plan() -> None:
    plan = plan_transfer(SPECS, parties(fsdp(2), str), [], 64)
    assert len(plan.buckets.sender) == 0 and plan.sending(0) == []
    plan = plan_transfer(SPECS, parties(fsdp(2), str), [Party("far", ())], 64)
    assert plan.taking(0) == []


def test_float32_weights_travel_in_the_dtype_of_the_wire() -> None:
    specs: Specs = {"a": (torch.bfloat16, (4, 8))}
    party = Party("x", (*held("a", (4, 8)),))
    plan = plan_transfer(specs, [party], [Party("far", party.regions)], 1024)
    [bucket] = plan.sending(0)
    source, payload = torch.randn(4, 8), torch.empty(bucket.nbytes, dtype=torch.uint8)
    pack(bucket, {"a": source}, payload)
    target = torch.zeros(4, 8, dtype=torch.bfloat16)
    unpack(plan.taking(0)[0], payload, {"a": target})
    assert bucket.nbytes == 64 and target.equal(source.bfloat16())


def test_a_model_of_many_layers_is_planned_in_a_second() -> None:
    """Layers that are alike are cut into cells once, so that a model of a trillion parameters takes seconds."""
    specs: Specs = {f"{layer}.experts": (torch.bfloat16, (64, 4096, 7168)) for layer in range(30)}
    shape = (64, 4096, 7168)
    senders = [
        Party(f"t{rank // 8}", tuple(r for name in specs for r in held(name, shape, [(0, 64, rank)])))
        for rank in range(64)
    ]
    receivers = [
        Party(f"e{rank // 8}", tuple(r for name in specs for r in held(name, shape, [(2, 32, rank)])))
        for rank in range(32)
    ]
    start = time.process_time()
    plan = plan_transfer(specs, senders, receivers, 64 << 20)
    assert time.process_time() - start < 10.0
    free, bound = np.zeros(96), max(plan.bytes_sent.max(), plan.bytes_over_links.max())
    for sender, receiver, nbytes in zip(plan.buckets.sender, plan.buckets.receiver, plan.buckets.nbytes, strict=True):
        free[[sender, 64 + receiver]] = max(free[sender], free[64 + receiver]) + nbytes
    assert free.max() <= 1.3 * bound
