"""Tests that the backends train each token with the experts of its route, and leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.codecs.tokens.routes import RoutesDamaged
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    Row,
    backend_config,
    flat,
    gradients_of,
    micro_batch,
    random_rows,
    save_tiny_model,
)
from headrace.tests.trainers.backends.experts.routed_rows import (
    Reference,
    all_missing,
    random_routes,
    routed,
    spec_of,
    with_own_logprobs,
)
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.router_replay import RoutesDiffer

ON = RouterReplayConfig(enabled=True, native_agreement_every=0)
SHORT = ("padded", "packed, recomputed")
"""Layouts of `make test`."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": "packed"},
    "recomputed": {"recompute": "full"},
    "packed, recomputed": {"packing": "packed", "recompute": "full"},
}
each_layout = pytest.mark.parametrize(
    "layout", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)


@pytest.fixture(scope="module")
def plain(model: str) -> FsdpBackend:
    """A backend without replay."""
    return FsdpBackend(backend_config(model), 0, 1)


def build(model: str, replay: RouterReplayConfig = ON, **changes: Any) -> FsdpBackend:
    return FsdpBackend(backend_config(model, router_replay=replay, **changes), 0, 1)


def chunks(rows: list[Row], routes: list[np.ndarray], model: str) -> list[Any]:
    """Return two microbatches."""
    spec = spec_of(model)
    return [routed(rows[:4], routes[:4], spec), routed(rows[4:], routes[4:], spec)]


def used_experts(backend: FsdpBackend) -> list[list[torch.Tensor]]:
    """Return lists, one for each layer with experts, to which the experts that tokens are sent to are appended."""
    used: list[list[torch.Tensor]] = []
    for name, module in backend._policy.model.named_modules():
        if name.endswith("mlp.experts"):
            calls: list[torch.Tensor] = []
            module.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[1]))
            used.append(calls)
    return used


@each_layout
def test_experts_of_the_routes_are_used_in_forward_and_backward(model: str, layout: str) -> None:
    rows, spec = random_rows(1, 7), spec_of(model)
    routes = random_routes(rows, spec)
    routes[2][1] = spec.mark  # a missing route in the middle of a row
    backend = build(model, **LAYOUTS[layout])
    used = used_experts(backend)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([routed(rows, routes, spec)], 1)
    recomputed = LAYOUTS[layout].get("recompute") == "full"
    assert [len(calls) for calls in used] == [1 + recomputed] * len(spec.layers)
    width = max(len(row.ids) for row in rows) - 1
    starts = np.cumsum([0, *(len(row.ids) - 1 for row in rows)]) if "packed" in layout else width * np.arange(len(rows))
    for layer, calls in enumerate(used):
        for call in calls:
            for start, own in zip(starts, routes, strict=False):
                known = own[:-1, layer, 0] != spec.mark
                got = call[start : start + len(own) - 1].numpy()
                assert np.array_equal(got[known], own[:-1, layer][known]), layer
                assert (got < spec.num_experts).all(), "a token without a route has the router's own experts"


@each_layout
def test_own_routes_change_nothing_and_missing_ones_not_a_bit(model: str, plain: FsdpBackend, layout: str) -> None:
    rows, routes = with_own_logprobs(random_rows(2, 7), Reference(model))
    expected = gradients_of(plain, [micro_batch(rows[:4]), micro_batch(rows[4:])])
    backend = build(model, **LAYOUTS[layout])
    own = gradients_of(backend, chunks(rows, routes, model))
    assert torch.linalg.norm(flat(own) - flat(expected)) <= 1e-6 * torch.linalg.norm(flat(expected))
    missing = gradients_of(backend, chunks(rows, all_missing(rows, spec_of(model)), model))
    same = plain if not LAYOUTS[layout] else FsdpBackend(backend_config(model, **LAYOUTS[layout]), 0, 1)
    native = gradients_of(same, [micro_batch(rows[:4]), micro_batch(rows[4:])])
    assert all(torch.equal(missing[name], native[name]) for name in native)
    others = gradients_of(backend, chunks(rows, random_routes(rows, spec_of(model)), model))
    assert torch.linalg.norm(flat(others) - flat(expected)) > 0.1 * torch.linalg.norm(flat(expected))
    routers = [name for name in others if name.endswith("mlp.gate.weight")]
    assert routers and all(others[name].abs().sum() > 0 for name in routers), "gradients flow through the gates"


def test_recomputing_changes_no_bit_and_chunks_do_not_matter(model: str) -> None:
    rows, spec = random_rows(3, 8), spec_of(model)
    routes = random_routes(rows, spec)
    kept, again, partly = (
        gradients_of(build(model, recompute=how), chunks(rows, routes, model)) for how in ("none", "full", "selective")
    )
    assert all(torch.equal(kept[name], again[name]) and torch.equal(kept[name], partly[name]) for name in kept)
    single = gradients_of(build(model), [routed([row], [own], spec) for row, own in zip(rows, routes, strict=True)])
    assert torch.linalg.norm(flat(single) - flat(kept)) <= 1e-6 * torch.linalg.norm(flat(kept))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks for it itself
def test_compiled_layers_replay_each_pass_with_its_own_routes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend="aot_eager"))  # C++ takes a minute
    rows, spec = random_rows(3, 8), spec_of(model)
    plain, compiled = build(model, packing="packed"), build(model, packing="packed", compile=True)
    for seed in (1, 2):
        micros = chunks(rows, random_routes(rows, spec, seed), model)
        wanted, got = flat(gradients_of(plain, micros)), flat(gradients_of(compiled, micros))
        assert torch.linalg.norm(got - wanted) <= 1e-5 * torch.linalg.norm(wanted)
    torch._dynamo.reset()


def test_only_tokens_with_a_route_differ(model: str, plain: FsdpBackend) -> None:
    rows, spec = random_rows(4, 6), spec_of(model)
    rows = [row for row in rows if row.mask.any()]
    routes = all_missing(rows, spec)
    routes[1][: len(routes[1]) - 1] = random_routes(rows, spec)[1][: len(routes[1]) - 1]
    backend = build(model)
    [before], [after] = plain.logprobs([micro_batch(rows)], 1), backend.logprobs([routed(rows, routes, spec)], 1)
    ends = np.cumsum([len(row.ids) for row in rows])
    other = np.zeros(len(before), bool)
    other[ends[0] : ends[1]] = True
    torch.testing.assert_close(after[~other], before[~other], rtol=0, atol=1e-5)
    assert (before[other] - after[other]).abs().max() > 1e-2


def test_the_reference_model_never_replays(model: str, plain: FsdpBackend) -> None:
    rows, spec = random_rows(5, 6), spec_of(model)
    backend = build(model)
    [expected] = plain.logprobs([micro_batch(rows)], 1, reference=True)
    for micro in (micro_batch(rows), routed(rows, random_routes(rows, spec), spec)):
        [got] = backend.logprobs([micro], 1, reference=True)
        assert torch.equal(got, expected)


def test_an_exception_leaves_no_route_behind(model: str) -> None:
    rows, spec = random_rows(6, 6), spec_of(model)
    routes = random_routes(rows, spec)
    backend = build(model)
    expected = gradients_of(backend, [routed(rows, routes, spec)])
    hook = backend._policy.model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients_of(backend, [routed(rows, routes, spec)])
    hook.remove()
    backend.abort_step()
    assert backend._replay is not None and backend._replay._routes is None
    again = gradients_of(backend, [routed(rows, routes, spec)])
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_step_reports_what_the_own_routers_would_have_done(model: str, plain: FsdpBackend) -> None:
    rows, routes = with_own_logprobs(random_rows(7, 8), Reference(model))
    spec = spec_of(model)
    changed = [array.copy() for array in routes]
    for array in changed:
        array[:-1, 0] = (array[:-1, 0] + 1) % spec.num_experts  # the first layer's experts are other ones
    config = RouterReplayConfig(enabled=True, native_agreement_every=2)
    backend = build(model, config, prev="rollout", lr=1e-9)
    figures = []
    for _ in range(3):
        backend.begin_step(TEMPERATURE)
        backend.accumulate(chunks(rows, changed, model), 2)
        figures.append(backend.finish_step())
    assert ["routes/native_agreement" in step for step in figures] == [True, False, True]
    first = figures[0]
    layers = [first[f"routes/native_agreement_layer_{layer}"] for layer in spec.layers]
    assert layers[0] < 0.5 and layers[1:] == [1.0] * (len(spec.layers) - 1)
    assert first["routes/native_agreement"] == pytest.approx(np.mean(layers))
    # Without replay the trainer is the reference, whose log-probs the rows have; with it, it is not.
    assert first["routes/native_mismatch_max"] < 1e-5 < 1e-2 < first["logprob/mismatch_mean"]
    probed = backend.native_figures(chunks(rows, changed, model)[:1], 1, temperature=TEMPERATURE)
    assert probed == pytest.approx({name: value for name, value in first.items() if name in probed}, rel=1e-3, abs=1e-6)
    assert len(probed) == len(spec.layers) + 5
    with pytest.raises(ValueError, match="router_replay.enabled: got false, expected true"):
        plain.native_figures([], 0)
    assert first["routes/native_ratio_error"] == pytest.approx(1.0, abs=1e-5) and first["logprob/ratio_error"] > 1.01


def test_damaged_routes_and_other_experts_are_noticed(model: str) -> None:
    rows, spec = random_rows(8, 5), spec_of(model)
    routes = random_routes(rows, spec)
    twice = [array.copy() for array in routes]
    twice[1][0, 1] = 3
    config = RouterReplayConfig(enabled=True, verify="values", native_agreement_every=0)
    checked = build(model, config)
    with pytest.raises(RoutesDamaged, match=rf"token {len(routes[0])}, layer {spec.layers[1]}: experts \[3, 3\]"):
        checked.logprobs([routed(rows, twice, spec)], 1)
    checked.logprobs([routed(rows, routes, spec)], 1)
    with pytest.raises(ValueError, match="has no 'routed_experts'"):
        checked.logprobs([micro_batch(rows)], 1)
    fewer = dataclasses.replace(spec, layers=spec.layers[:-1])
    with pytest.raises(ValueError, match=r"has routes \[2, 2\] of torch.uint8, expected \[3, 2\]"):
        checked.logprobs([routed(rows, [array[:, :2] for array in routes], fewer)], 1)
    followed = build(model, RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=0))
    assert len(flat(gradients_of(followed, [routed(rows, routes, spec)])))
    gate = followed._policy.model.get_submodule(f"model.layers.{spec.layers[0]}.mlp.gate")
    gate.register_forward_hook(lambda _, __, output: (output[0], output[1], output[2].flip(0)))
    followed._replay._begun = 0  # type: ignore[union-attr]  # the next step is the first again
    with pytest.raises(RoutesDiffer, match=f"layer {spec.layers[0]} sent token"):
        gradients_of(followed, [routed(rows, routes, spec)])


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router_replay.enabled: got true, expected false for a model of type 'qwen3'"):
        build(save_tiny_model(tmp_path))


@contextlib.contextmanager
def opened(model: str, replay: RouterReplayConfig = ON, **changes: Any) -> Iterator[Any]:
    from headrace.trainers.backends.megatron.backend import MegatronBackend

    config = backend_config(model, router_replay=replay, backend="megatron", packing="packed", **changes)
    with contextlib.closing(MegatronBackend(config, 0, 1)) as backend:
        yield backend


@pytest.mark.megatron
def test_own_missing_and_other_routes(model: str) -> None:
    reference = Reference(model)
    rows, routes = with_own_logprobs(random_rows(2, 7), reference)
    others = random_routes(rows, reference.spec)
    missing = all_missing(rows, reference.spec)

    def halves(routes: Any) -> list[Any]:
        return [routed(rows[:4], routes[:4], reference.spec), routed(rows[4:], routes[4:], reference.spec)]

    with opened(model, RouterReplayConfig()) as backend:
        assert all(getattr(layer.mlp, "router", None) is None or layer.mlp.router.router_replay is None
                   for layer in backend._policy.decoder.layers), "nothing is hooked when replay is off"  # fmt: skip
        native = gradients_of(backend, [micro_batch(rows[:4]), micro_batch(rows[4:])])
        [logprobs] = backend.logprobs([micro_batch(rows)], 1)
    with opened(model) as backend:
        same = gradients_of(backend, halves(missing))
        assert all(torch.equal(same[name], native[name]) for name in native)
        own = gradients_of(backend, halves(routes))
        assert torch.linalg.norm(flat(own) - flat(native)) <= 1e-6 * torch.linalg.norm(flat(native))
        changed = gradients_of(backend, halves(others))
        assert torch.linalg.norm(flat(changed) - flat(native)) > 0.1 * torch.linalg.norm(flat(native))
        assert all(grad.abs().sum() > 0 for name, grad in changed.items() if name.endswith("router.weight"))
        [replayed] = backend.logprobs([routed(rows, others, reference.spec)], 1)
        assert not torch.allclose(replayed, logprobs, atol=1e-2)
        [untouched] = backend.logprobs([micro_batch(rows)], 1, reference=True)
        torch.testing.assert_close(untouched, logprobs, rtol=0, atol=1e-6)
    variants: list[dict[str, Any]] = [
        {"recompute": "full"}, {"recompute": "full", "recompute_layers": 1}, {"recompute": "selective"}
    ]  # fmt: skip
    for keeps in variants:
        with opened(model, **keeps) as backend:
            layers, calls = backend._policy.decoder.layers, list[int]()
            for index, layer in enumerate(layers):
                layer.mlp.register_forward_pre_hook(lambda *_, index=index, calls=calls: calls.append(index))
            again = gradients_of(backend, halves(others))
            assert all(torch.equal(again[name], changed[name]) for name in changed), keeps
            twice = len(layers) if "recompute_layers" not in keeps else 1
            assert list(map(calls.count, range(len(layers)))) == [4] * twice + [2] * (len(layers) - twice), keeps


@pytest.mark.megatron
def test_a_pass_that_fails_leaves_no_route_and_no_queue(model: str) -> None:
    rows, spec = random_rows(3, 6), spec_of(model)
    micro = routed(rows, random_routes(rows, spec), spec)
    with opened(model, recompute="full") as backend:
        expected = gradients_of(backend, [micro, micro])
        replay, layers = backend._replay, backend._policy.decoder.layers
        for where in ("register_forward_hook", "register_full_backward_hook"):
            hook = getattr(layers[-1].mlp, where)(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                gradients_of(backend, [micro, micro])
            hook.remove()
            backend.abort_step()
            assert replay._routes is None and not replay._queueing and not any(replay._queues)
        again = gradients_of(backend, [micro, micro])
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        replay._queues[1].append(torch.zeros(1, 2))
        with pytest.raises(
            RuntimeError, match=r"not recomputed in the backward pass \(layer: microbatches\): \{2: 1\}"
        ):
            replay.check_drained()
        assert not any(replay._queues)


@pytest.mark.megatron
def test_other_experts_and_other_routers_are_noticed(model: str) -> None:
    rows, spec = random_rows(4, 5), spec_of(model)
    micro = routed(rows, random_routes(rows, spec), spec)
    with opened(model, RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=0)) as backend:
        gradients_of(backend, [micro])
        router = backend._policy.decoder.layers[2].mlp.router
        inner = router.routing
        router.routing = lambda *args, **options: tuple(part.flip(0) for part in inner(*args, **options))
        backend._replay._begun = 0  # the next step is the first again
        with pytest.raises(RoutesDiffer, match="layer 2 sent token"):
            gradients_of(backend, [micro])
        from headrace.trainers.backends.megatron.megatron_routers import check_router

        check_router(router)
        for key, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "aux_loss")):
            before = getattr(router.config, key)
            setattr(router.config, key, value)
            router.routing_type = router.config.moe_router_load_balancing_type
            with pytest.raises(ValueError, match=f"replay does not reach routers with .*{key}={value!r}"):
                check_router(router)
            setattr(router.config, key, before)
        with pytest.raises(ValueError, match=r"whose routers \(Linear\) cannot replay choices"):
            check_router(torch.nn.Linear(1, 1))
