"""The digest that a GPU computes: sees every kind of accident, and is the same wherever it is computed."""

from __future__ import annotations

import pytest
import torch

from headrace.codecs.weights import gpu_scatter
from headrace.codecs.weights.gpu_scatter import device_digest, device_digests

SIZES = [0, 1, 7, 8, 9, 4096, 4099 * 8 - 1, 4099 * 8, 4099 * 8 + 1, 3 * 4099 * 8 + 77, 1 << 20]


def payload(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_every_changed_byte_changes_it(size: int) -> None:
    data = payload(size)
    expected = int(device_digest(data))
    assert int(device_digest(data.clone())) == expected
    for at in {0, 1, size // 2, size - 2, size - 1} if size > 2 else range(size):
        changed = data.clone()
        changed[at] ^= 1 << at % 8
        assert int(device_digest(changed)) != expected, at


def test_length_counts() -> None:
    """Zeros at the end are bytes, too."""
    digests = {int(device_digest(torch.zeros(size, dtype=torch.uint8))) for size in SIZES}
    assert len(digests) == len(SIZES)


def test_pieces_in_the_wrong_place_change_it() -> None:
    data = payload(1 << 22)
    expected = int(device_digest(data))
    for piece in (8, 64, 4096, 1 << 15, 1 << 20):
        for first, second in ((0, piece), (0, 2 * piece), (piece, (1 << 22) - piece)):
            moved = data.clone()
            moved[first : first + piece] = data[second : second + piece]
            moved[second : second + piece] = data[first : first + piece]
            assert int(device_digest(moved)) != expected, (piece, first, second)
        stale = data.clone()
        stale[-piece:] = data[:piece]
        assert int(device_digest(stale)) != expected


def words_of(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int64)


@pytest.mark.parametrize("bit", [63, 62, 61, 48])
def test_high_bits_flipped_in_any_even_number_of_words_change_it(bit: int) -> None:
    """Such as the signs of pairs of weights."""
    data = torch.randn(1 << 16, generator=torch.Generator().manual_seed(bit)).bfloat16().view(torch.uint8)
    expected, generator = int(device_digest(data)), torch.Generator().manual_seed(1)
    flip = 1 << bit if bit < 63 else -(1 << 63)
    for trial in range(100):
        changed = data.clone()
        chosen = torch.randperm(len(data) // 8, generator=generator)[: 2 * (1 + trial % 32)]
        words_of(changed)[chosen] ^= flip
        assert int(device_digest(changed)) != expected, trial
    negated = data.clone()
    negated.view(torch.bfloat16).neg_()
    assert int(device_digest(negated)) != expected


def test_neighbouring_signs_flipped_change_it() -> None:
    data = payload(1 << 15)
    expected = int(device_digest(data))
    for first in range(0, len(data) // 8 - 8, 8):
        for others in ((1,), (1, 2, 3), (4099 % 4000,), (2, 4, 6)):
            changed = data.clone()
            words_of(changed)[[first, *(min(first + other, len(data) // 8 - 1) for other in others)]] ^= -(1 << 63)
            assert int(device_digest(changed)) != expected, (first, others)


def test_a_bit_stuck_in_all_words_changes_it() -> None:
    for seed in range(40):
        data = torch.randn(1 << 15, generator=torch.Generator().manual_seed(seed)).bfloat16().view(torch.uint8)
        stuck = data.clone()
        words_of(stuck).bitwise_and_((1 << 63) - 1)
        assert int(device_digest(stuck)) != int(device_digest(data)), seed


def test_blocks_of_any_size_that_changed_places_change_it() -> None:
    data = payload(1 << 19)
    expected = int(device_digest(data))
    for words in (1, 2, 64, 4096, 4099, 8198):
        moved, size = data.clone(), words * 8
        moved[:size], moved[size : 2 * size] = data[size : 2 * size], data[:size]
        assert int(device_digest(moved)) != expected, words


def test_pieces_are_summed_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = payload(100_003)
    expected = int(device_digest(data))
    monkeypatch.setattr(gpu_scatter, "_CHUNK_WORDS", 1000)
    assert int(device_digest(data)) == expected


def test_a_view_at_any_byte_is_digested_as_its_copy() -> None:
    data = payload(100_000)
    for start in (0, 1, 3, 8, 64):
        assert int(device_digest(data[start:])) == int(device_digest(data[start:].clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_finds_the_same(size: int) -> None:
    data = payload(size)
    assert int(device_digest(data.cuda())) == int(device_digest(data))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_digests_of_several_payloads_are_those_of_each(device: str) -> None:
    for sizes in (SIZES, [size * 8 for size in SIZES if size], []):
        payloads = [payload(size).to(device) for size in sizes]
        assert device_digests(payloads).tolist() == [int(device_digest(one)) for one in payloads]
