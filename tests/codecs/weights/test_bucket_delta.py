"""Bucket deltas: the new version's very bits from the old one's, in few bytes when few elements changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.weights.buckets import apply_sparse, encode_sparse

WIDTHS = [1, 2, 4, 8]


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def change(base, element_bytes, positions):
    """A copy with other bits in the elements at `positions`."""
    new = base.copy()
    new.view(f"u{element_bytes}")[positions] ^= 1
    return new


def apply(payload, base):
    payload.flags.writeable = False
    target = base.copy()
    apply_sparse(payload, target)
    return target


@settings(max_examples=150)
@given(st.sampled_from(WIDTHS), st.integers(0, 3000), st.floats(0, 1), st.integers(0, 2**32))
def test_round_trip(element_bytes, num_elements, share, seed):
    rng = np.random.default_rng(seed)
    base = random_bytes(num_elements * element_bytes, seed)
    positions = np.flatnonzero(rng.random(num_elements) < share * share)
    new = change(base, element_bytes, positions)
    payload = encode_sparse(new, base, element_bytes)
    if payload is None:
        # not even the cheapest way of telling the positions would have been shorter
        assert 40 + min(len(positions), num_elements // 8 + 1) + len(positions) * element_bytes >= len(new) - 8
        return
    assert payload.dtype == np.uint8 and payload.ndim == 1 and len(payload) < len(new)
    assert np.array_equal(apply(payload, base), new)


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from([0, 1, 7, 254, 255, 256, 509, 510, 511, 65533, 65534, 65535, 65536, 131070]), max_size=8),
    st.integers(0, 600),
)
def test_gaps_at_the_limits_of_their_integers(gaps, after):
    positions = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    num_elements = int(positions[-1] if len(positions) else 0) + 1 + after
    base = random_bytes(2 * num_elements)
    new = change(base, 2, positions)
    payload = encode_sparse(new, base, 2)
    if payload is None:
        assert len(new) < 32 + 8 + 6 * len(positions)
    else:
        assert np.array_equal(apply(payload, base), new)


@pytest.mark.parametrize(
    "share, most",
    [(0.0, 0.0001), (0.00002, 0.001), (0.001, 0.004), (0.01, 0.017), (0.05, 0.08), (0.3, 0.37), (0.8, 0.87)],
)
def test_few_changes_are_few_bytes(share, most):
    """Of bfloat16 elements: a share of the whole's bytes."""
    rng = np.random.default_rng(3)
    base = random_bytes(2 << 20)
    new = change(base, 2, np.flatnonzero(rng.random(1 << 20) < share))
    payload = encode_sparse(new, base, 2)
    assert payload is not None and len(payload) <= most * len(new) + 64
    assert np.array_equal(apply(payload, base), new)


def test_all_changed_is_no_delta():
    base = random_bytes(4096)
    assert encode_sparse(~base, base, 4) is None
    assert encode_sparse(base[:0], base[:0], 2) is None


def test_bits_are_compared():
    base = np.array([0.0, np.nan, 1.0, 2.0] * 16, dtype=np.float32)
    new = base.copy()
    new[0] = -0.0
    payload = encode_sparse(new.view(np.uint8), base.view(np.uint8), 4)
    assert payload is not None and len(payload) == 44  # one value: the NaNs are what they were
    got = apply(payload, base.view(np.uint8)).view(np.float32)
    assert np.signbit(got[0]) and got.tobytes() == new.tobytes()
    other_nan = base.copy()
    other_nan.view(np.uint32)[1] |= 1
    payload = encode_sparse(other_nan.view(np.uint8), base.view(np.uint8), 4)
    assert payload is not None and apply(payload, base.view(np.uint8)).tobytes() == other_nan.tobytes()


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.booleans(), st.data())
def test_damage_writes_nothing_beyond_the_target(seed, dense, data):
    base = random_bytes(2000, seed)
    positions = np.flatnonzero(np.random.default_rng(seed).random(1000) < (0.3 if dense else 0.01))
    payload = encode_sparse(change(base, 2, positions), base, 2)
    assert payload is not None
    memory = np.concatenate([base, np.full(64, 7, np.uint8)])
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    else:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        apply_sparse(payload, memory[:2000])
    except ValueError:
        assert np.array_equal(memory[:2000], base)
    assert np.all(memory[2000:] == 7)


def test_errors_name_what_is_wrong():
    base = random_bytes(400)
    payload = encode_sparse(change(base, 2, [3, 90]), base, 2)
    assert payload is not None
    with pytest.raises(ValueError, match="got a bucket of 398 bytes, expected 400"):
        apply_sparse(payload, base[:398].copy())
    with pytest.raises(ValueError, match="got 7 bytes, expected a header"):
        apply_sparse(payload[:7], base)
    with pytest.raises(ValueError, match="not a bucket delta"):
        apply_sparse(base, base)
    with pytest.raises(ValueError, match="expected 44"):
        apply_sparse(payload[:-1], base)
    with pytest.raises(ValueError, match="got 400 and 398 bytes with elements of 2"):
        encode_sparse(base, base[:398], 2)
    with pytest.raises(ValueError, match="with elements of 3"):
        encode_sparse(base, base, 3)
    with pytest.raises(ValueError, match="contiguous uint8"):
        encode_sparse(base[::2], base[::2], 2)
