"""Encodes the sets of tokens from which sampled tokens were drawn, with top-p, top-k or min-p, as a stream of bytes.

The set of a token is what `token_sampling.log_distribution` left of the vocabulary at the token's position. A trainer
that takes the softmax over the same set computes the same log-probs as the engine. Tokens that were drawn from the
whole vocabulary, and tokens that the policy did not choose, have no set.

    stream   pieces, one after another, so that streams of turns are joined by joining their bytes
    piece    2 n           n tokens without a set
             2 n + 1       n tokens with sets: n headers, then n payloads
             0             the seal at the end of a row: a checksum of the bytes before it
    header   0             the set has the sampled token alone
             2 m - 1       m other ids; payload: the first id, then each distance to the id before it, less 1
             2 w           w words of a bitmap; payload: the first id, then the words, 7 ids each, from the first id on

All numbers have 7 bits in a byte, and the highest bit says that the number goes on (LEB128). The sampled token itself
is not written, so a set of one token takes one byte. Of the two payloads, the shorter one is written. Most damaged
streams are streams of other sets, and a trainer would compute other log-probs over them, so the rows in the data plane
have seals, which are checked when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from ..batch import Ragged
from ..integers import ceil_div, cut_up, exclusive_cumsum
from ..schema import Field, Kind

MASKS = "sampling_masks"
"""Name of the field that holds the sets of a row's tokens."""
MASK_FIELD = Field(MASKS, Kind.RAGGED, torch.uint8)
_BITS = 7
_LONGEST = 5
"""Largest number of bytes of a number, enough for 35 bits."""
_SEAL = 1 + _LONGEST
"""Number of bytes of a seal."""


class MasksDamaged(ValueError):
    """Raised for bytes that are no sets of tokens, or those of another row."""


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The sets of T tokens, without the sampled tokens themselves."""

    ids: np.ndarray
    """The other ids of all sets, one set after another, ascending in each, int64."""
    counts: np.ndarray
    """Number of other ids in each token's set, int64 `[T]`; -1 for a token without a set."""

    @property
    def restricted(self) -> np.ndarray:
        """True for each token that has a set, bool `[T]`."""
        return self.counts >= 0

    def select(self, index: np.ndarray) -> TokenSets:
        """Return the sets of the tokens at `index`, int64, in that order."""
        sizes = np.maximum(self.counts, 0)
        taken = sizes[index]
        places = np.arange(taken.sum()) + np.repeat(exclusive_cumsum(sizes)[index] - exclusive_cumsum(taken), taken)
        return TokenSets(self.ids[places], self.counts[index])


def encode_sets(tokens: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the stream of the sets of T tokens, uint8.

    tokens: the sampled tokens, int `[T]`. ids: ids of all sets, one set after another, ascending in each. counts:
    number of ids of each set, the sampled token among them, int `[T]`; -1 for a token without a set. Raises
    MasksDamaged if a set lacks its sampled token.
    """
    sizes = np.maximum(counts, 0).astype(np.int64)
    own = np.repeat(tokens, sizes) == ids
    owners = np.repeat(np.arange(len(tokens)), sizes)
    lacking = (np.bincount(owners[own], minlength=len(tokens)) != 1) & (counts >= 0)
    if lacking.any():
        at = int(lacking.argmax())
        raise MasksDamaged(
            f"sampling mask of token {at}: it lacks the sampled token {int(tokens[at])}, expected it once"
        )
    return _encode(TokenSets(np.asarray(ids, np.int64)[~own], np.where(counts < 0, -1, sizes - 1)))


def without_sets(num_tokens: int) -> np.ndarray:
    """Return the stream of tokens that have no sets, uint8; empty for no tokens."""
    return _numbers(np.array([2 * num_tokens] if num_tokens else [], np.int64))


def first_tokens(stream: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the stream of the first `num_tokens` tokens of a stream."""
    return _encode(decode_sets(stream).select(np.arange(num_tokens)))


def sealed(stream: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the stream of a whole row of `num_tokens` tokens with its seal."""
    check = xxhash.xxh32_intdigest(stream.tobytes(), seed=num_tokens)
    digits = [check >> _BITS * place & 127 | 128 for place in range(_LONGEST)]
    return np.concatenate([stream, np.array([0, *digits[:-1], digits[-1] & 127], np.uint8)])


def check_seals(column: Ragged, lengths: np.ndarray, keys: Sequence[str]) -> None:
    """Raise MasksDamaged, naming the row, unless each row of the column has the bytes that were sealed. lengths: number
    of tokens of each row, int64 `[N]`. keys: their keys."""
    streams = cut_up(column.values.numpy(), column.shapes[:, 0])
    for key, length, stream in zip(keys, lengths.tolist(), streams, strict=True):
        if not np.array_equal(stream, sealed(stream[:-_SEAL], length)):
            raise MasksDamaged(
                f"{key}: the sampling masks are damaged, or those of another row than one of {length} tokens"
            )


def _encode(sets: TokenSets) -> np.ndarray:
    free = ~sets.restricted
    borders = [0, *(np.flatnonzero(np.diff(free)) + 1).tolist(), len(free)]
    pieces = [np.zeros(0, np.uint8)]
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        if stop > start:
            part = sets.select(np.arange(start, stop))
            pieces.append(without_sets(stop - start) if free[start] else _piece(part.ids, part.counts))
    return np.concatenate(pieces)


def _piece(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    filled = np.flatnonzero(counts)
    sizes = counts[filled]
    starts = exclusive_cumsum(sizes)
    firsts, widths = ids[starts], ids[starts + sizes - 1] - ids[starts]
    gaps = np.diff(ids, prepend=0) - 1
    gaps[starts] = firsts
    words = widths // _BITS + 1
    cost = np.add.reduceat(_lengths(gaps), starts) if len(starts) else sizes
    dense = cost > words + _lengths(firsts)
    headers = np.zeros(len(counts), np.int64)
    headers[filled] = np.where(dense, 2 * words, 2 * sizes - 1)
    lengths = np.where(dense, 1 + words, sizes)
    places = exclusive_cumsum(lengths)
    payload = np.zeros(int(lengths.sum()), np.int64)
    apart = np.repeat(~dense, sizes)
    payload[np.arange(len(ids))[apart] + np.repeat(places - starts, sizes)[apart]] = gaps[apart]
    payload[places] = firsts
    inside = ids[~apart] - np.repeat(firsts, sizes)[~apart]
    word = np.repeat(places + 1, sizes)[~apart] + inside // _BITS
    np.bitwise_or.at(payload, word, 1 << inside % _BITS)
    return _numbers(np.concatenate([[2 * len(counts) + 1], headers, payload]))


def _lengths(numbers: np.ndarray) -> np.ndarray:
    """Return the number of bytes of each number, int64."""
    return np.searchsorted([1 << _BITS * more for more in range(1, _LONGEST)], numbers, "right") + 1


def _numbers(numbers: np.ndarray) -> np.ndarray:
    """Return the bytes of numbers, uint8."""
    lengths = _lengths(numbers)
    starts, out = exclusive_cumsum(lengths), np.zeros(int(lengths.sum()), np.uint8)
    for place in range(int(lengths.max(initial=0))):
        longer = lengths > place
        out[starts[longer] + place] = (numbers[longer] >> _BITS * place & 127) | (lengths[longer] > place + 1) * 128
    return out


def decode_sets(stream: np.ndarray, num_tokens: int | None = None, key: str = "") -> TokenSets:
    """Return the sets of a stream's tokens.

    num_tokens: number of tokens that the stream must have; None for any. key: name of the row, for errors. Raises
    MasksDamaged if the bytes are no stream, or that of another number of tokens.
    """
    where, numbers, at = key or "sampling masks", _read_numbers(stream, key), 0
    ids, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while at < len(numbers):
        if not numbers[at]:
            at += 2
            continue
        count, kind = divmod(int(numbers[at]), 2)
        headers = numbers[at + 1 : at + 1 + count * kind]
        at += 1 + len(headers)
        if not kind:
            expect = num_tokens if num_tokens is not None else count
            counts.append(np.full(min(count, expect + 1), -1, np.int64))  # A damaged number can be huge.
            continue
        lengths = np.where(headers & 1, ceil_div(headers, 2), np.where(headers, headers // 2 + 1, 0))
        total = int(lengths.sum())
        if len(headers) < count or at + total > len(numbers):
            raise MasksDamaged(f"{where}: the sets of {count} tokens end too early")
        found, sizes = _sets(headers, lengths, numbers[at : at + total])
        ids.append(found)
        counts.append(sizes)
        at += total
    sets = TokenSets(np.concatenate(ids), np.concatenate(counts))
    if num_tokens is not None and len(sets.counts) != num_tokens:
        raise MasksDamaged(f"{where}: got the sampling masks of {len(sets.counts)} tokens, expected {num_tokens}")
    return sets


def _sets(headers: np.ndarray, lengths: np.ndarray, payload: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the sets of a piece, and the number of ids of each set."""
    dense = (headers > 0) & (headers & 1 == 0)
    token = np.repeat(np.arange(len(headers)), lengths)
    first = np.zeros(len(payload), bool)
    first[exclusive_cumsum(lengths)[lengths > 0]] = True
    firsts = np.zeros(len(headers), np.int64)
    firsts[lengths > 0] = payload[first]
    gaps = ~dense[token]
    steps = np.where(first, payload, payload + 1)[gaps]
    running = np.cumsum(steps)
    before = (running - steps)[first[gaps]]
    apart = running - np.repeat(before, lengths[~dense & (lengths > 0)])
    words = dense[token] & ~first
    word_at, bit = ((payload[words, None] >> np.arange(_BITS)) & 1).nonzero()
    owner = token[words][word_at]
    places = np.arange(len(payload)) - np.repeat(exclusive_cumsum(lengths), lengths) - 1
    near = firsts[owner] + _BITS * places[words][word_at] + bit
    owners = np.concatenate([token[gaps], owner])
    order = np.argsort(owners, kind="stable")
    return np.concatenate([apart, near])[order], np.bincount(owners, minlength=len(headers))


def _read_numbers(stream: np.ndarray, key: str) -> np.ndarray:
    if not len(stream):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(stream < 128)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    if not len(ends) or ends[-1] != len(stream) - 1 or (ends - starts >= _LONGEST).any():
        raise MasksDamaged(f"{key or 'sampling masks'}: the bytes are no sampling masks")
    place = np.arange(len(stream)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((stream.astype(np.int64) & 127) << _BITS * place, starts)
