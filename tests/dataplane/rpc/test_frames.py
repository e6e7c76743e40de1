"""Frames on a socket: an absurd size is refused before anything is buffered."""

from __future__ import annotations

import pytest

from headrace.dataplane.rpc.frames import HEADER, MAX_FRAME_BYTES, FrameReader, frame, head


def test_a_frame_of_a_mad_size_is_refused_before_it_is_buffered() -> None:
    reader = FrameReader()
    whole = frame(1, b"body", "put")
    with pytest.raises(ValueError, match="a frame of 1099511627776 bytes, expected at most 4294967296"):
        reader.feed(whole + HEADER.pack(1 << 40, 2, 3) + b"put" + b"x" * 1000)
    assert len(reader) == 0
    assert reader.feed(whole) == [(1, "put", b"body")]


def test_a_message_that_no_reader_would_take_is_not_sent() -> None:
    assert len(head(1, MAX_FRAME_BYTES - 3, "put")) == HEADER.size + 3
    with pytest.raises(ValueError, match="put: got a message of 4294967296 bytes, expected less"):
        head(1, MAX_FRAME_BYTES, "put")
