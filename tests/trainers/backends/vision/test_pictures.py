"""Tests that rows with pictures get the log-probs and gradients that plain transformers gives them one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    backend_config,
    gradients_of,
    logprobs_of,
    run_on_ranks,
    save_tiny_model,
    weights_of,
)
from headrace.tests.trainers.backends.vision.tiny_vlms import (
    IMAGE,
    MODELS,
    TOWERS,
    PlainVlm,
    Shown,
    picture,
    save_vlm,
    shown_rows,
)
from headrace.trainers.backends.fsdp import causal_lm
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.vision import tower_attention

LOGPROBS, GRADIENT = 1e-5, 1e-6


@pytest.fixture(scope="module", params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vlm(tmp_path_factory.mktemp("vlm") / name, name)


def build(folder: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(backend_config(folder, **changes), 0, 1)


def wanted_of(plain: PlainVlm, shown: Shown) -> torch.Tensor:
    """Return the log-probs of all rows, 0 where the mask is 0."""
    with torch.no_grad():
        return torch.cat([plain.row_logprobs(row) * torch.from_numpy(row.mask) for row in shown.rows])


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_logprobs_and_gradients_are_those_of_transformers(folder: str, name: str, packing: str) -> None:
    shown = shown_rows(name)
    plain, backend = PlainVlm(folder, shown), build(folder, packing=packing)
    wanted, micro = wanted_of(plain, shown), shown.micro()
    found = logprobs_of(backend, micro, temperature=TEMPERATURE)
    assert wanted.std() > 0.5, "an error would not show"
    assert (found - wanted).abs().max() <= LOGPROBS
    single, double = plain.gradients(), PlainVlm(folder, shown, torch.float64).gradients()
    ours = gradients_of(backend, [micro])
    backend.close()
    assert set(ours) == set(single) and any(key.startswith(TOWERS[name]) for key in ours)
    for part in ("", TOWERS[name]):  # Float32 alone can make a larger error in the gradients of the tower.
        limit = max(GRADIENT, 2 * distance(single, double, part))
        assert limit < 1e-5 and distance(ours, double, part) <= limit, part


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], part: str) -> float:
    """Return the relative distance of two gradients, of the weights whose names begin with `part`."""
    first, second = (
        torch.cat([each[key].double().flatten() for key in sorted(each) if key.startswith(part)])
        for each in (one, other)
    )
    return float(torch.linalg.norm(first - second) / torch.linalg.norm(second))


def test_every_picture_counts_and_text_stays_as_it_is(folder: str, name: str) -> None:
    shown, backend = shown_rows(name), build(folder)
    first = logprobs_of(backend, shown.micro()).split([len(row.ids) for row in shown.rows])
    other = picture(name, 9, 4, 2)
    assert other.num_tokens == shown.pictures[2][0].num_tokens
    changed = Shown(shown.rows, [*shown.pictures[:2], [other, shown.pictures[2][1]], []])
    second = logprobs_of(backend, changed.micro()).split([len(row.ids) for row in shown.rows])
    changes = [float((one - two).abs().max()) for one, two in zip(first, second, strict=True)]
    assert changes[2] > 0.1 and max(changes[0], changes[1], changes[3]) <= LOGPROBS
    text = logprobs_of(backend, replace(shown.micro([3]), pictures=None))
    assert (text - first[3]).abs().max() <= LOGPROBS
    backend.close()


def test_a_frozen_tower_has_no_gradients(folder: str, name: str) -> None:
    shown, plain = shown_rows(name), build(folder)
    backend = build(folder, freeze=[f"{TOWERS[name]}*"])
    micro = shown.micro()
    every, some = gradients_of(plain, [micro]), gradients_of(backend, [micro])
    assert set(some) == {key for key in every if not key.startswith(TOWERS[name])}
    assert all(torch.allclose(some[key], every[key], rtol=1e-4, atol=1e-6) for key in some)
    for one in (plain, backend):
        one.close()


def test_an_export_is_the_whole_model(folder: str, name: str, tmp_path: Path) -> None:
    (Path(folder) / "preprocessor_config.json").write_text('{"patch_size": 14}')
    backend = build(folder)
    weights = weights_of(backend)
    backend.export_model(str(tmp_path / "out"))
    backend.close()
    source, written = (
        dict(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).named_parameters())
        for path in (folder, tmp_path / "out")
    )
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"patch_size": 14}'
    assert set(weights) == set(source) == set(written)
    assert all(torch.equal(weights[key], source[key]) and torch.equal(written[key], source[key]) for key in source)


def test_wrong_rows_are_named(folder: str, name: str, tmp_path: Path) -> None:
    shown, backend = shown_rows(name), build(folder)
    ids, own = shown.rows[1].ids.copy(), shown.pictures[1][0].num_tokens
    ids[0] = IMAGE
    more = Shown([shown.rows[0], replace(shown.rows[1], ids=ids)], shown.pictures[:2])
    said = f"images: row 1 has {own + 1} placeholders of pictures, expected {own}, the number of features"
    with pytest.raises(ValueError, match=said):
        backend.logprobs([more.micro()], 1)
    missing = Shown(shown.rows[:2], [shown.pictures[0], []])
    with pytest.raises(ValueError, match=f"images: row 1 has {own} placeholders of pictures, expected 0, the number"):
        backend.logprobs([missing.micro()], 1)
    assert np.isfinite(logprobs_of(backend, shown.micro()).numpy()).all(), "the backend can be used after an error"
    backend.close()
    blind = build(save_tiny_model(tmp_path / "blind"))
    with pytest.raises(ValueError, match="model.path: got a Qwen3ForCausalLM, expected a model that takes pictures"):
        blind.logprobs([shown.micro()], 1)
    blind.close()


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_a_sampled_placeholder_stands_for_itself(folder: str, name: str, packing: str) -> None:
    shown, rows = shown_rows(name), []
    for row, number in zip(shown.rows, (2, 0, 1, 2), strict=True):
        ids, first = row.ids.copy(), int(row.mask.argmax())
        ids[first : first + number] = IMAGE
        rows.append(replace(row, ids=ids))
    sampled = Shown(rows, shown.pictures)
    plain, backend = PlainVlm(folder, sampled), build(folder, packing=packing)
    with torch.no_grad():
        wanted = torch.cat([plain.decoded(row) for row in rows])
    found = logprobs_of(backend, sampled.micro(), temperature=TEMPERATURE)
    backend.close()
    assert (found - wanted).abs().max() <= LOGPROBS


def attend_densely(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Stand in for the kernel of packed rows, which needs a GPU."""
    *_, scale, _window = rest
    parts = zip(*(part.split(ends.diff().tolist()) for part in (q, k, v)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in row), is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
            for row in parts
        ]
    )


def test_the_kernel_of_packed_rows_is_for_the_language_part(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's tokens of a picture see each other, which the kernel cannot compute."""
    monkeypatch.setattr(causal_lm, "attend_rows", attend_densely)
    shown, backend = shown_rows(name), build(folder, packing="packed")
    model = backend._policy.model
    model.set_attn_implementation("sdpa")
    wanted = logprobs_of(backend, shown.micro())
    causal_lm.use_varlen_attention(model)
    own = model.config.text_config._attn_implementation
    assert own == ("sdpa" if name == "gemma3" else causal_lm.VARLEN)
    assert (logprobs_of(backend, shown.micro()) - wanted).abs().max() <= LOGPROBS
    backend.close()


def attend_windows_densely(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, _: torch.Tensor, *longest: int, scale: float
) -> torch.Tensor:
    """Stand in for torch's kernel, which needs a GPU."""
    assert ends.dtype == torch.int32 and longest == (int(ends.diff().max()),) * 2
    parts = zip(*(part.split(ends.diff().tolist()) for part in (q, k, v)), strict=True)
    seen = [F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in one), scale=scale) for one in parts]
    return torch.cat([one.transpose(0, 1) for one in seen])


def test_a_tower_with_windows_attends_in_one_call(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of all pictures go into one call for each layer. Towers without windows keep their function."""
    calls = []
    monkeypatch.setattr(
        tower_attention,
        "varlen_attn",
        lambda *given, **named: calls.append(1) or attend_windows_densely(*given, **named),
    )
    shown, backend = shown_rows(name), build(folder, packing="packed")
    model = backend._policy.model
    model.set_attn_implementation("sdpa")
    wanted, gradients = logprobs_of(backend, shown.micro()), gradients_of(backend, [shown.micro()])
    tower_attention.use_window_attention(model)
    windows = name.startswith("qwen")
    assert (model.config.vision_config._attn_implementation == tower_attention.WINDOWS) == windows
    assert (logprobs_of(backend, shown.micro()) - wanted).abs().max() <= LOGPROBS
    depth = getattr(model.config.vision_config, "depth", 0)
    assert len(calls) == (depth if windows else 0)
    again = gradients_of(backend, [shown.micro()])
    assert distance(again, gradients, "") <= 10 * GRADIENT, "sums of another order, through all layers"
    backend.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_kernel_of_windows_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    folder, shown = save_vlm(tmp_path / name, name), shown_rows(name)
    found = []
    for attention in ("eager", "auto"):
        backend = build(folder, packing="packed", attention=attention)
        found.append(logprobs_of(backend, shown.micro()))
        backend.close()
    assert (found[0] - found[1]).abs().max() <= 0.05, "bfloat16"


def sums_on(rank: int, world: int, folder: str, name: str, mesh: Topology) -> dict[str, Any]:
    """Return the log-probs and the summed gradients of one of two ranks. With dp 2 the second one has a row without
    pictures."""
    backend = FsdpBackend(backend_config(folder, topology=mesh), rank, world)
    shown = shown_rows(name)
    shares = [[0, 1, 2], [3]] if mesh.dp == 2 else [range(4)] * 2
    micro = shown.micro(shares[rank], beside=shown.pictures[0])
    found: dict[str, Any] = {
        "logprobs": torch.cat(backend.logprobs([micro], 1, temperature=TEMPERATURE) or [torch.zeros(0)])
    }
    found["gradients"] = gradients_of(backend, [micro])
    if mesh.dp == 2:
        with pytest.raises(ValueError, match="images: got a microbatch without a picture, expected at least one, to "):
            backend.logprobs([shown.micro([3])], 1)
    backend.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("mesh", [Topology(2), Topology(1, tp=2)], ids=["dp2", "tp2"])
def test_two_ranks_compute_the_same(mesh: Topology, tmp_path: Path) -> None:
    """A rank without a picture of its own takes part in the passes of the tower."""
    name = "qwen2_5_vl"
    folder, shown = save_vlm(tmp_path / name, name), shown_rows(name)
    alone = build(folder)
    wanted, gradients = logprobs_of(alone, shown.micro(), temperature=TEMPERATURE), gradients_of(alone, [shown.micro()])
    alone.close()
    ranks = run_on_ranks(sums_on, 2, tmp_path / "ranks", folder, name, mesh)
    found = torch.cat([one["logprobs"] for one in ranks])
    assert (found - wanted).abs().max() <= LOGPROBS
    for rank in ranks:
        assert set(rank["gradients"]) == set(gradients)
        for key, expected in gradients.items():
            assert torch.linalg.norm(rank["gradients"][key] - expected) <= 1e-4 * torch.linalg.norm(expected), key


def test_a_step_can_show_no_picture(folder: str, name: str) -> None:
    """Weights of the tower then have no gradient, and stay as they are."""
    backend, shown = build(folder), shown_rows(name)
    before = weights_of(backend)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([replace(shown.micro([3]), pictures=None)], 1)
    backend.finish_step()
    after = weights_of(backend)
    backend.close()
    changed = {key for key, weight in after.items() if not torch.equal(weight, before[key])}
    assert changed and not any(key.startswith(TOWERS[name]) for key in changed)


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_a_microbatch_without_rows_only_runs_the_tower(folder: str, name: str, packing: str) -> None:
    """A rank has such microbatches when it has fewer rows than others."""
    shown, backend = shown_rows(name), build(folder, packing=packing)
    nothing = shown.micro([], beside=shown.pictures[0])
    assert [len(column) for column in backend.logprobs([nothing], 1) or []] == [0]
    alone, both = gradients_of(backend, [shown.micro()]), gradients_of(backend, [shown.micro(), nothing])
    backend.close()
    assert alone.keys() == both.keys() and all(torch.equal(alone[key], both[key]) for key in alone)


def test_the_word_vision_freezes_the_tower(folder: str, name: str, tmp_path: Path) -> None:
    backend, shown = build(folder, freeze=["vision"]), shown_rows(name)
    assert not any(key.startswith(TOWERS[name]) for key in gradients_of(backend, [shown.micro()]))
    backend.close()
    said = "trainer.freeze: got 'vision', expected patterns of names, because Qwen3ForCausalLM has no vision tower"
    with pytest.raises(ValueError, match=said):
        build(save_tiny_model(tmp_path / "blind"), freeze=["vision"])
