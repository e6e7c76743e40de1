"""Tests of copy plans: a repeated load gives the same parameters, and only plain copies make a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.actors.engines.vllm.copy_plan import CopyPlan, PlanRecorder
from headrace.codecs.weights.parameter_digests import DigestTaker, compare_digests

HIDDEN, WIDTH = 8, 12


class Fused(torch.nn.Module):
    """A worker's share of a layer, of rank `rank` of 2: fused gate and up split by rows, down by columns, experts."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.gate_up = torch.nn.Parameter(torch.zeros(WIDTH, HIDDEN))
        self.down = torch.nn.Parameter(torch.zeros(HIDDEN, WIDTH // 2))
        self.experts = torch.nn.Parameter(torch.zeros(3, HIDDEN, HIDDEN))
        self.embedding = torch.nn.Parameter(torch.ones(10, HIDDEN))
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN))

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        half = WIDTH // 2
        for name, weight in weights.items():
            if name in ("gate", "up"):
                rows = self.gate_up.data.narrow(0, half * (name == "up"), half)
                rows.copy_(weight.narrow(0, half * self.rank, half))
            elif name == "down":
                self.down.data.copy_(weight.narrow(1, half * self.rank, half))
            elif name == "experts":
                for expert, one in enumerate(weight.unbind(0)):
                    self.experts.data[expert].copy_(one)
            elif name == "embedding":
                self.embedding.data[: len(weight)].copy_(weight)
                self.embedding.data[len(weight) :].fill_(0)
            else:
                self.norm.data.copy_(weight)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "experts": (3, HIDDEN, HIDDEN),
        "embedding": (9, HIDDEN),
        "norm": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def record(model: torch.nn.Module, load: Callable[[dict[str, torch.Tensor]], None], sent: dict) -> CopyPlan | str:
    """In two loads, as bucket by bucket."""
    recorder = PlanRecorder(model)
    names = list(sent)
    for part in (names[:2], names[2:]):
        some = {name: sent[name] for name in part}
        with recorder.watching(list(some.items())), torch.no_grad():
            load(some)
    return recorder.plan()


def test_copies_go_through_views_and_past_modules_that_are_left_out() -> None:
    """A kernel keeps `down` transposed and padded; what `head` does with its weight is not seen."""
    model, sent, half = Fused(1), weights(0), WIDTH // 2
    padded = torch.zeros(HIDDEN + 4, half + 4)
    model.down, view = torch.nn.Parameter(padded.t(), requires_grad=False), padded[:HIDDEN, :half]
    head = model.head = torch.nn.Linear(HIDDEN, 9, bias=False)

    def load(some: dict[str, torch.Tensor]) -> None:
        if "embedding" in some:
            head.weight.data = some["embedding"].clone()
        for name, one in some.items():
            model.load({name: one}) if name != "down" else view.copy_(one.narrow(1, half, half))

    recorder = PlanRecorder(model, {id(model.down): view}, [head])
    with recorder.watching(list(sent.items())), torch.no_grad():
        load(sent)
    plan = recorder.plan()
    assert isinstance(plan, CopyPlan), plan
    assert plan.others == sent.keys() - {"down"} and plan.loads(sent)
    head.weight = torch.nn.Parameter(torch.zeros(9, HIDDEN))
    assert plan.load(list(weights(1).items())) and plan.loads(sent)
    assert torch.equal(model.down.t()[:HIDDEN, :half], weights(1)["down"][:, half:])
    assert not padded[HIDDEN:].any() and not padded[:, half:].any()
    assert torch.equal(model.norm, sent["norm"]), "it is loaded by the loaders"
    with pytest.raises(RuntimeError, match="element 0 of down and others are not written by the model's loaders"):
        PlanRecorder(model, {id(model.down): view}, [head]).plan()


def test_weights_of_which_a_worker_has_everything_are_read_back() -> None:
    model, sent = Fused(), weights(0)
    plan = record(model, model.load, sent)
    assert isinstance(plan, CopyPlan)
    taker = DigestTaker(1, list(sent))
    for name, tensor in sent.items():
        taker.take(name, tensor)
    read = {weight.name: plan.read(weight) for weight in taker.result().weights}
    assert {name for name, tensors in read.items() if not tensors} == {"gate", "up", "down"}, "it has half of each"
    assert compare_digests(taker.result(), plan.read, "engine") == (3, "")
    with torch.no_grad():
        model.experts[2, 1, 1] += 1
    assert "'experts' has digest" in compare_digests(taker.result(), plan.read, "engine")[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_does_what_the_loaders_did(rank: int) -> None:
    model, expected = Fused(rank), Fused(rank)
    plan = record(model, model.load, weights(0))
    assert isinstance(plan, CopyPlan), plan
    assert plan.num_copies == 8 and plan.loads(weights(0))
    for seed in (1, 2):
        sent = weights(seed)
        with torch.no_grad():
            expected.load(sent)
            for name, tensor in sent.items():
                assert plan.load([(name, tensor)])
        for name, parameter in expected.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_bit_pattern_of_a_dtype_is_copied_as_it_is(device: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(256, 256)
    model = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16, device=device)

    def load(sent: dict[str, torch.Tensor]) -> None:
        if sent:
            model.weight.data.copy_(sent["w"])

    plan = record(model, load, {"w": every.view(torch.bfloat16)})
    assert isinstance(plan, CopyPlan)
    model.weight.data.zero_()
    assert plan.load([("w", every.view(torch.bfloat16))])
    assert torch.equal(model.weight.data.view(torch.int16), every)


def test_weights_in_one_storage_are_told_apart() -> None:
    """As they lie in a bucket, one behind the other."""
    sent = weights(0)
    flat = torch.cat([tensor.reshape(-1) for tensor in sent.values()])
    inside, at = {}, 0
    for name, tensor in sent.items():
        inside[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    model, expected = Fused(), Fused()
    plan = record(model, model.load, inside)
    assert isinstance(plan, CopyPlan), plan
    flat.copy_(torch.randn(len(flat)))
    with torch.no_grad():
        expected.load(inside)
        plan.load(list(inside.items()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, sent: model.norm.data.copy_(sent["norm"] + 1), "norm is computed from what was sent"),
        (lambda model, sent: model.norm.data.copy_(sent["gate"][0, 0]), "norm is spread out from gate"),
        (lambda model, sent: model.norm.data.fill_(sent["norm"][0].item()), "look at the values of norm"),
        (lambda model, sent: model.norm.data.add_(sent["norm"]), r"norm is changed by aten\.add_"),
        (lambda model, sent: model.norm.data[1:].copy_(sent["norm"][1:]), "element 0 of norm and others are not"),
        (lambda model, sent: model.norm.data[:2].copy_(sent["norm"][:2]), "element 2 of norm and others are not"),
        (lambda model, sent: [model.norm.data.copy_(sent["norm"]) for _ in "12"], r"elements 0\.\.7 of norm .* twice"),
        (
            lambda model, sent: (
                setattr(model, "norm", torch.nn.Parameter(sent["norm"].clone())),
                model.norm.data.copy_(sent["norm"]),
            ),
            "the loaders replaced parameters",
        ),
    ],
)
def test_no_plan_of_other_than_plain_copies(change: Callable, reason: str) -> None:
    model = Fused()

    def load(some: dict[str, torch.Tensor]) -> None:
        model.load({name: tensor for name, tensor in some.items() if name != "norm"})
        if "norm" in some:
            change(model, {**weights(0), **some})

    sent = weights(0)
    if "gate" in reason:  # the loader's source must be among what is sent at once
        recorder = PlanRecorder(model)
        with recorder.watching(list(sent.items())), torch.no_grad():
            model.load({name: tensor for name, tensor in sent.items() if name != "norm"})
            change(model, sent)
        found = recorder.plan()
    else:
        found = record(model, load, sent)
    assert isinstance(found, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_no_plan_across_dtypes() -> None:
    model = Fused()
    sent = {name: tensor.double() for name, tensor in weights(0).items()}
    found = record(model, model.load, sent)
    assert isinstance(found, str) and "was sent as torch.float64" in found


def test_a_plan_is_of_these_weights_and_parameters_only() -> None:
    model = Fused()
    plan = record(model, model.load, weights(0))
    assert isinstance(plan, CopyPlan)
    norm = weights(0)["norm"]
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for name, tensor in (("nrom", norm), ("norm", norm[1:]), ("norm", norm.half()), ("norm", norm.repeat(2)[::2])):
        assert not plan.load([("embedding", weights(1)["embedding"]), (name, tensor)]), name
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters()), "nothing was copied"
    names = list(weights(0))
    assert plan.loads(names) and not plan.loads(names[1:]) and not plan.loads([*names[1:], "nrom"])
    own, model.norm.data = model.norm.data, model.norm.data.clone()
    assert not plan.loads(names)
    model.norm.data = own
    assert plan.loads(names)
    model.norm = torch.nn.Parameter(own)
    assert not plan.loads(names)
