"""Routes keep what the engine chose, and what no router can have chosen is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.jagged import pack, to_padded
from headrace.codecs.schema import Field, Kind, Schema
from headrace.codecs.tokens.routes import (
    RoutesDamaged,
    RouteSpec,
    align_routes,
    check_routes,
    expert_layers,
    join_routes,
    missing_mark,
    missing_tokens,
    routes_dtype,
    select_moe_layers,
)
from headrace.tests.example_counts import examples

modest = settings(max_examples=examples(60))


def moe(layers: int = 4, **extra) -> SimpleNamespace:
    return SimpleNamespace(**{"num_hidden_layers": layers, "num_experts": 16, "num_experts_per_tok": 4} | extra)


def spec_of(experts: int = 16, top_k: int = 4) -> RouteSpec:
    spec = RouteSpec.of(moe(num_experts=experts, num_experts_per_tok=top_k, mlp_only_layers=[0]))
    assert spec is not None
    return spec


def chosen(spec: RouteSpec, tokens: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((tokens, len(spec.layers), spec.num_experts))
    return scores.argsort(-1)[..., : spec.top_k].astype(spec.numpy_dtype)


@modest
@given(st.integers(1, 1024), st.integers(1, 4))
def test_the_mark_is_never_an_expert_and_fits_the_type_with_every_expert(experts: int, top_k: int) -> None:
    spec = spec_of(experts, min(top_k, experts))
    limits = torch.iinfo(routes_dtype(experts))
    assert missing_mark(experts) not in range(experts)
    assert limits.min <= missing_mark(experts) <= limits.max and experts - 1 <= limits.max
    assert spec.dtype.itemsize == (1 if experts <= 255 else 2)
    assert spec.missing(3).dtype == spec.numpy_dtype and missing_tokens(spec.missing(3), spec).all()
    routes = chosen(spec, 5)
    assert not missing_tokens(routes, spec).any()
    check_routes(np.concatenate([routes, spec.missing(2)]), spec, "0.0")


@pytest.mark.parametrize("experts", [0, 40_000])
def test_a_number_of_experts_without_a_type_is_refused(experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts: got {experts}"):
        routes_dtype(experts)


def test_the_layers_with_experts_follow_the_models_rule() -> None:
    assert expert_layers(moe()) == (0, 1, 2, 3)
    assert expert_layers(moe(mlp_only_layers=[0])) == (1, 2, 3)
    assert expert_layers(moe(decoder_sparse_step=2)) == (1, 3)
    assert RouteSpec.of(SimpleNamespace(num_hidden_layers=4)) is None
    assert RouteSpec.of(moe(mlp_only_layers=[0])) == RouteSpec((1, 2, 3), 4, 16, 4)


def test_layers_without_experts_are_left_out_before_anything_is_checked() -> None:
    spec = spec_of()
    routes = chosen(spec, 7)
    reported = np.zeros((7, 4, 4), np.int32)
    reported[:, 1:] = routes
    selected = select_moe_layers(reported, spec)
    assert (selected == routes).all() and selected.dtype == np.uint8 and selected.flags.c_contiguous
    assert (select_moe_layers(routes, spec) == routes).all()
    check_routes(selected, spec, "0.0")


def test_what_an_engine_reported_with_other_experts_or_layers_is_refused() -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match=r"got shape \(7, 5, 4\), expected \[tokens, 4 or 3, 4\]"):
        select_moe_layers(np.zeros((7, 5, 4), np.uint8), spec)
    with pytest.raises(ValueError, match="got expert ids from 0 to 300, expected 0 to 15"):
        select_moe_layers(np.full((1, 4, 4), [0, 1, 2, 300], np.uint16), spec)


def test_256_experts_travel_as_two_bytes_with_id_255_intact() -> None:
    spec = RouteSpec((0,), 2, 256, 1)
    selected = select_moe_layers(np.array([[[255, 0]]], np.uint8), spec)
    assert selected.dtype == np.int16 and selected.tolist() == [[[255, 0]]] and not missing_tokens(selected, spec)[0]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        pytest.param([3, 3, 1, 0], r"\[3, 3, 1, 0\]", id="twice"),
        pytest.param([3, 16, 1, 0], r"\[3, 16, 1, 0\]", id="out of range"),
        pytest.param([255, 255, 255, 255], r"\[255, 255, 255, 255\]", id="missing in one layer"),
    ],
)
def test_a_route_that_no_router_can_choose_names_row_token_and_layer(value: list[int], found: str) -> None:
    spec = spec_of()
    routes = chosen(spec, 6)
    routes[4, 1] = value
    with pytest.raises(RoutesDamaged, match=f"abc.1: token 4, layer 2: experts {found}, expected 4 different ids"):
        check_routes(routes, spec, "abc.1")


def test_an_unmarked_slot_of_zeros_is_found_as_a_duplicate() -> None:
    spec = spec_of()
    with pytest.raises(RoutesDamaged, match=r"token 0, layer 1"):
        check_routes(np.zeros((2, 3, 4), np.uint8), spec, "0.0")


def test_an_array_of_another_shape_or_type_is_damaged() -> None:
    spec = spec_of()
    for routes in (chosen(spec, 3)[:, :2], chosen(spec, 3).astype(np.int16)):
        with pytest.raises(RoutesDamaged, match="expected"):
            check_routes(routes, spec, "0.0")


@modest
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 3))
def test_pieces_of_one_sequence_are_joined_as_a_loop_over_tokens_would(sizes: list[int], overlap: int) -> None:
    """Each piece may begin before the last one ended, as a continuation that computes its prompt again does."""
    spec = spec_of()
    pieces, starts, expected, end = [], [], {}, 0
    for index, size in enumerate(sizes):
        start = max(end - overlap, 0)
        piece = chosen(spec, size, seed=index)
        for offset in range(size):
            expected.setdefault(start + offset, piece[offset])
        pieces.append(piece)
        starts.append(start)
        end = max(end, start + size)
    joined = join_routes(pieces, starts, spec)
    assert len(joined) == end
    assert all((joined[token] == route).all() for token, route in expected.items())
    assert missing_tokens(joined, spec).sum() == end - len(expected)


def test_what_no_piece_covers_is_missing() -> None:
    spec = spec_of()
    joined = join_routes([chosen(spec, 2), chosen(spec, 3)], [0, 4], spec)
    assert missing_tokens(joined, spec).tolist() == [False, False, True, True, False, False, False]
    assert len(join_routes([], [], spec)) == 0


@modest
@given(st.integers(0, 9), st.integers(0, 9))
def test_a_rows_last_token_never_has_a_route(reported: int, length: int) -> None:
    spec = spec_of()
    routes = chosen(spec, reported)
    aligned = align_routes(routes, length, spec)
    assert len(aligned) == length
    for token in range(length):
        known = token < min(reported, length - 1)
        assert (aligned[token] == (routes[token] if known else spec.mark)).all()
    assert missing_tokens(align_routes(None, length, spec), spec).all()


def test_padding_of_the_column_is_missing_not_expert_zero() -> None:
    spec = spec_of()
    schema = Schema([Field("input_ids", Kind.PER_TOKEN, torch.int32), spec.field])
    rows = [chosen(spec, 3), chosen(spec, 5)]
    ids = [torch.arange(3, dtype=torch.int32), torch.arange(5, dtype=torch.int32)]
    batch = pack(schema, {"input_ids": ids, "routed_experts": [torch.from_numpy(row) for row in rows]})
    padded = to_padded(batch)[0]["routed_experts"]
    assert missing_tokens(padded[0, 3:], spec).all() and not missing_tokens(padded[0, :3], spec).any()
