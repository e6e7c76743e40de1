"""Parts of an engine's weights go to train ranks whole, and an engine that fails or rounds them is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from headrace.actors.weight_sync import base_offer
from headrace.actors.weight_sync.base_offer import WeightReader, WeightServer
from headrace.dataplane.security.handshake import new_key
from headrace.dataplane.security.run_key import RunKey

KEY = new_key()
WEIGHTS = {
    "w": torch.randn(1000, 40),
    "half": torch.randn(7, 3).bfloat16(),
    "scalar": torch.tensor(3.0),
    "experts": torch.randn(4, 6, 5),
}


@contextmanager
def connected(
    key: bytes = KEY, read: Callable[[str], torch.Tensor] = WEIGHTS.__getitem__, timeout_s: float = 10.0
) -> Iterator[WeightReader]:
    with closing(WeightServer("engine 0", key, read, timeout_s)) as server:
        with WeightReader(server.offer, key, timeout_s) as reader:
            yield reader


def read(reader: WeightReader, name: str, *box: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full([stop - start for start, stop in box], float("nan"), dtype=dtype)
    for place, values in reader.parts(name, box, dtype):
        out[tuple(slice(*ends) for ends in place)] = values
    return out


@pytest.mark.parametrize("tls", [False, True])
def test_parts_of_weights_arrive(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_offer, "PART_BYTES", 1000)
    with connected(RunKey.make(new_key(), "", "run", tls=tls)) as reader:
        assert torch.equal(read(reader, "w", (500, 1000), (0, 40)), WEIGHTS["w"][500:])
        assert torch.equal(read(reader, "w", (0, 1000), (10, 20)), WEIGHTS["w"][:, 10:20])
        assert torch.equal(read(reader, "experts", (1, 3), (0, 6), (2, 5)), WEIGHTS["experts"][1:3, :, 2:])
        assert torch.equal(read(reader, "scalar"), WEIGHTS["scalar"])
        assert torch.equal(read(reader, "half", (0, 7), (0, 3), dtype=torch.bfloat16), WEIGHTS["half"])


def test_what_an_engine_cannot_give_is_told() -> None:
    with connected() as reader:
        with pytest.raises(OSError, match=r"half: the engine keeps it in bfloat16, expected no fewer digits"):
            read(reader, "half", (0, 7), (0, 3))
    with connected() as reader:
        with pytest.raises(OSError, match="other: no such weight"):
            read(reader, "other", (0, 7))
        assert torch.equal(read(reader, "scalar"), WEIGHTS["scalar"])  # the connection goes on
        with pytest.raises(OSError, match=r"w: got 160 bytes, expected the shape \(2, 40\)"):
            read(reader, "w", (999, 1001), (0, 40))


def test_an_engine_that_stops_in_the_middle_ends_the_wait() -> None:
    def dies(name: str) -> torch.Tensor:
        raise ConnectionError("the engine is gone")

    with connected(read=dies) as reader, pytest.raises(OSError, match="closed by the other end"):
        read(reader, "w", (0, 10), (0, 40))
