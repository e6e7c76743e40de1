"""The digest that a GPU computes: sees every kind of accident, and is the same wherever it is computed."""

from __future__ import annotations

import pytest
import torch

from headrace.codecs.gpu_scatter import device_digest

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


def test_a_view_at_any_byte_is_digested_as_its_copy() -> None:
    data = payload(100_000)
    for start in (0, 1, 3, 8, 64):
        assert int(device_digest(data[start:])) == int(device_digest(data[start:].clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_finds_the_same(size: int) -> None:
    data = payload(size)
    assert int(device_digest(data.cuda())) == int(device_digest(data))
