"""The megatron backend replays routes in forward and backward passes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.tests.trainers.backends.backend_ranks import backend_config, micro_batch, random_rows
from headrace.tests.trainers.backends.router_replay.routed_rows import (
    TEMPERATURE,
    Reference,
    all_missing,
    random_routes,
    routed,
    save_moe,
    spec_of,
    with_own_logprobs,
)
from headrace.trainers.backends.router_replay import RoutesDiffer

pytestmark = pytest.mark.megatron

ON = RouterReplayConfig(enabled=True, native_agreement_every=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_moe(tmp_path_factory.mktemp("moe"))


@contextlib.contextmanager
def opened(model: str, replay: RouterReplayConfig = ON, **changes: Any) -> Iterator[Any]:
    from headrace.trainers.backends.megatron.backend import MegatronBackend

    config = backend_config(model, router_replay=replay, backend="megatron", packing="packed", **changes)
    with contextlib.closing(MegatronBackend(config, 0, 1)) as backend:
        yield backend


def gradients(backend: Any, micros: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the summed gradients of a step, which is then aborted."""
    backend.begin_step(TEMPERATURE)
    backend.accumulate(iter(micros), len(micros))
    found = {name: param.main_grad.clone() for name, param in backend._policy.named_parameters()}
    backend.abort_step()
    return found


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in gradients.values()])


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
        native = gradients(backend, [micro_batch(rows[:4]), micro_batch(rows[4:])])
        [logprobs] = backend.logprobs([micro_batch(rows)], 1)
    with opened(model) as backend:
        same = gradients(backend, halves(missing))
        assert all(torch.equal(same[name], native[name]) for name in native)
        own = gradients(backend, halves(routes))
        assert torch.linalg.norm(flat(own) - flat(native)) <= 1e-6 * torch.linalg.norm(flat(native))
        changed = gradients(backend, halves(others))
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
            passes = [0] * len(backend._policy.decoder.layers)
            for index, layer in enumerate(backend._policy.decoder.layers):
                layer.mlp.register_forward_pre_hook(partial(count, passes, index))
            again = gradients(backend, halves(others))
            assert all(torch.equal(again[name], changed[name]) for name in changed), keeps
            twice = len(passes) if "recompute_layers" not in keeps else 1
            assert passes == [4] * twice + [2] * (len(passes) - twice), keeps


def count(passes: list[int], index: int, *_: Any) -> None:
    passes[index] += 1


def test_a_pass_that_fails_leaves_no_route_and_no_queue(model: str) -> None:
    rows, spec = random_rows(3, 6), spec_of(model)
    micro = routed(rows, random_routes(rows, spec), spec)
    with opened(model, recompute="full") as backend:
        expected = gradients(backend, [micro, micro])
        replay, layers = backend._replay, backend._policy.decoder.layers
        for where in ("register_forward_hook", "register_full_backward_hook"):
            hook = getattr(layers[-1].mlp, where)(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                gradients(backend, [micro, micro])
            hook.remove()
            backend.abort_step()
            assert replay._routes is None and not replay._queueing and not any(replay._queues)
        again = gradients(backend, [micro, micro])
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        replay._queues[1].append(torch.zeros(1, 2))
        with pytest.raises(RuntimeError, match=r"computed again too rarely \(layer: microbatches\) \{2: 1\}"):
            replay.check_drained()
        assert not any(replay._queues)


def test_other_experts_and_other_routers_are_noticed(model: str) -> None:
    rows, spec = random_rows(4, 5), spec_of(model)
    micro = routed(rows, random_routes(rows, spec), spec)
    with opened(model, RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=0)) as backend:
        gradients(backend, [micro])
        router = backend._policy.decoder.layers[2].mlp.router
        inner = router.routing
        router.routing = lambda *args, **options: tuple(part.flip(0) for part in inner(*args, **options))
        backend._replay._begun = 0  # the next step is the first again
        with pytest.raises(RoutesDiffer, match="layer 2 sent token"):
            gradients(backend, [micro])
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
