"""Tests that rows packed into one row of all tokens compute what padded rows compute, and when rows are packed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tests.trainers.backends.backend_ranks import (
    COLUMNS,
    Row,
    backend_config,
    flat_gradients,
    logprobs_of,
    micro_batch,
    random_rows,
    run_step,
    save_tiny_llama,
    save_tiny_model,
    save_tiny_moe,
)
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.model_split import resolved_packing
from headrace.trainers.backends.rows.row_layout import lay_out

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[FsdpBackend, FsdpBackend]:
    """A padded and a packed backend with the same weights; the tests abort every step that they open."""
    torch.set_num_threads(1)
    model = save_tiny_model(tmp_path_factory.mktemp("tied"))
    return FsdpBackend(backend_config(model), 0, 1), FsdpBackend(backend_config(model, packing="packed"), 0, 1)


def short_row(length: int) -> Row:
    """Rows of one token are too short to have a response."""
    columns = {name: np.zeros(length, np.float32) for name in COLUMNS}
    return Row(np.full(length, 4, np.int32), np.zeros(length, np.uint8), columns, 1.0, 0)


@settings(max_examples=15)
@given(data=st.data())
def test_packed_rows_give_the_gradient_and_logprobs_of_padded_ones(
    pair: tuple[FsdpBackend, FsdpBackend], data: st.DataObject
) -> None:
    rows = random_rows(data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 9)))
    for length in data.draw(st.lists(st.integers(0, 2), max_size=3)):
        rows.insert(data.draw(st.integers(0, len(rows))), short_row(length))
    cut = data.draw(st.integers(0, len(rows)))
    padded, packed = (flat_gradients(backend, [rows[:cut], rows[cut:]]) for backend in pair)
    assert torch.linalg.norm(packed - padded) <= 1e-6 * torch.linalg.norm(padded)
    expected, got = (logprobs_of(backend, micro_batch(rows), temperature=0.7) for backend in pair)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_nothing_to_pack(pair: tuple[FsdpBackend, FsdpBackend]) -> None:
    assert len(logprobs_of(pair[1], micro_batch([]))) == 0
    for rows in ([], [short_row(0)], [short_row(1), short_row(1)]):
        metrics = run_step(pair[1], [rows])
        assert metrics["train/skipped"] == 1 and metrics["train/tokens"] == 0


@pytest.mark.parametrize("save", [save_tiny_moe, save_tiny_llama])
def test_experts_and_llama_pack_too(tmp_path: Path, save: object) -> None:
    model = save(tmp_path)  # type: ignore[operator]
    rows = random_rows(7, 8)
    padded = FsdpBackend(backend_config(model), 0, 1)
    packed = FsdpBackend(backend_config(model, packing="packed", recompute="full"), 0, 1)
    for _ in range(2):
        assert run_step(packed, [rows]) == pytest.approx(run_step(padded, [rows]), rel=1e-5, abs=1e-6)


def test_a_packed_layout_restarts_positions_and_drops_last_tokens() -> None:
    rows = [short_row(1), *random_rows(3, 2), short_row(0)]
    batch = micro_batch(rows).batch
    layout = lay_out(batch, CPU, packed=True)
    ids = np.concatenate([row.ids[:-1] for row in rows[1:3]])
    assert layout.input_ids.tolist() == [ids.tolist()]
    lengths = [len(row.ids) - 1 for row in rows[1:3]]
    assert layout.position_ids is not None and layout.ends is not None
    assert layout.position_ids.tolist() == [[*range(lengths[0]), *range(lengths[1])]]
    assert layout.ends.tolist() == [0, lengths[0], sum(lengths)] and layout.longest == max(lengths)
    everything = batch.jagged("input_ids").values
    assert torch.equal(layout.targets, everything[layout.index].long())
    before = layout.input_ids[0, layout.source]
    assert torch.equal(before, everything[layout.index - 1].long()), "each target is predicted by the token before it"
    empty = lay_out(micro_batch([]).batch, CPU, packed=True)
    assert empty.input_ids.shape == (1, 1) and empty.ends is not None and empty.ends.tolist() == [0, 1]


def test_a_model_whose_packed_rows_see_each_other_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = backend_config(save_tiny_model(tmp_path), packing="packed")
    FsdpBackend(config, 0, 1)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    with pytest.raises(ValueError, match="trainer.packing: got 'packed', expected 'none' or 'dynamic' for Qwen3ForCau"):
        FsdpBackend(config, 0, 1)


HALF: dict[str, Any] = {"mixed_precision": True}
QWEN: dict[str, Any] = {"model_type": "qwen3", "use_sliding_window": False}


@pytest.mark.parametrize(
    ("trainer", "model", "gpu", "expected"),
    [
        (HALF, QWEN, True, "packed"),
        ({**HALF, "backend": "megatron"}, QWEN, True, "packed"),
        (HALF, QWEN, False, "none"),
        ({}, QWEN, True, "none"),
        (HALF, {**QWEN, "use_sliding_window": True}, True, "packed"),
        (HALF, {"model_type": "gemma2"}, True, "none"),
        (HALF, {"model_type": "gpt2"}, True, "none"),
        ({**HALF, "backend": "megatron"}, {"model_type": "mixtral"}, True, "packed"),
        (HALF, {}, True, "none"),
        ({"backend": "megatron", "cp": 2}, QWEN, False, "packed"),
        ({**HALF, "packing": "dynamic"}, QWEN, True, "dynamic"),
        ({"packing": "packed"}, {}, False, "packed"),
    ],
)
def test_auto_packs_where_attention_takes_packed_rows(
    trainer: dict[str, Any], model: dict[str, Any], gpu: bool, expected: str
) -> None:
    assert resolved_packing(TrainerConfig(**trainer), SimpleNamespace(**model), gpu=gpu) == expected
