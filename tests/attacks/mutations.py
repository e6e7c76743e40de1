"""Damages bytes for the tests that send damaged messages to a port."""

from __future__ import annotations

import random


def mutated(dice: random.Random, frame: bytes) -> bytes:
    """Return the frame with one mutation: a byte changed, a range cut, doubled, moved, or random bytes put in."""
    at, until = sorted(dice.randrange(len(frame) + 1) for _ in range(2))
    until = min(until, at + 32)
    part = frame[at:until]
    kind = dice.randrange(5)
    if kind == 0:
        at = dice.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ dice.randrange(1, 256)]) + frame[at + 1 :]
    if kind == 1:
        return frame[:at] + frame[until:]
    if kind == 2:
        return frame[:until] + part + frame[until:]
    if kind == 3:
        return part + frame[:at] + frame[until:]
    return frame[:at] + dice.randbytes(dice.randrange(1, 32)) + frame[at:]
