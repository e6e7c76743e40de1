"""Weight buckets, whole and as differences: every tensor back with the same bits, and a name for what is wrong."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.integers import ALIGN
from headrace.codecs.messages import decode, encode
from headrace.codecs.schema import DTYPES
from headrace.codecs.weights.buckets import (
    CHUNK_BYTES,
    BucketPlan,
    apply_sparse,
    checksum,
    encode_sparse,
    expect_all,
    plan_buckets,
    read_bucket,
    write_piece,
)
from headrace.codecs.weights.gpu_scatter import device_digest


def spec(named):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}


def write_one(plan, bucket, named, old=0xAB):
    """The bucket, in memory that was full of another version's bytes; its running digest is its checksum."""
    out = torch.full((plan.sizes[bucket],), old, dtype=torch.uint8)
    digest = xxhash.xxh3_64()
    for entry in plan.in_bucket(bucket):
        write_piece(entry, named[entry.name], out, digest)
    assert digest.intdigest() == checksum(out)
    return out


def write(plan, named):
    return [write_one(plan, bucket, named) for bucket in range(len(plan.sizes))]


def read(plan, written):
    into: dict[str, torch.Tensor] = {}
    for bucket, payload in enumerate(written):
        read_bucket(plan, bucket, payload, into)
    expect_all(plan, range(len(written)))
    return into


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights(shapes, seed=0):
    rng = np.random.default_rng(seed)
    named = {}
    for index, (dtype, shape) in enumerate(shapes):
        tensor = torch.zeros(shape, dtype=dtype)
        flat = tensor.reshape(-1).view(torch.uint8)
        flat.copy_(torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 256, len(flat), dtype=np.uint8)))
        named[f"layers.{index}.weight"] = tensor
    return named


shapes = st.lists(
    st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=6
)


@settings(max_examples=60)
@given(shapes, st.integers(1, 8), st.integers(0, 2**32))
def test_weights_round_trip(tensors, lines, seed):
    named = weights(tensors, seed)
    plan = plan_buckets(spec(named), lines * ALIGN)
    assert plan == plan_buckets(spec(named), lines * ALIGN)
    assert all(size <= lines * ALIGN for size in plan.sizes)
    assert decode(encode(plan), BucketPlan) == plan
    assert plan.names == tuple(named)
    by_bucket = [plan.in_bucket(bucket) for bucket in range(len(plan.sizes))]
    assert tuple(entry for entries in by_bucket for entry in entries) == plan.entries
    assert all(entry.bucket == bucket for bucket, entries in enumerate(by_bucket) for entry in entries)
    got = read(plan, write(plan, named))
    assert list(got) == list(named)
    for name, tensor in named.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape and raw(got[name]) == raw(tensor)


@settings(max_examples=30)
@given(shapes, st.integers(1, 8), st.integers(0, 2**32))
def test_buckets_end_to_end_hold_each_tensor_in_one_piece(tensors, lines, seed):
    named = weights(tensors, seed)
    plan = plan_buckets(spec(named), lines * ALIGN)
    slot, starts = b"", []
    for payload in write(plan, named):
        starts.append(len(slot))
        slot += raw(payload) + bytes(-len(payload) % ALIGN)
    for entry in plan.entries:
        if not entry.begin:
            start = starts[entry.bucket] + entry.offset
            assert slot[start : start + len(raw(named[entry.name]))] == raw(named[entry.name])


def test_large_tensors_are_split_and_buckets_are_full():
    named = weights([(torch.float32, (100,)), (torch.bfloat16, (30, 7)), (torch.int8, (5,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    assert all(size > ALIGN for size in plan.sizes[:-1])  # full, but for what aligns the next tensor
    assert sum(entry.nbytes for entry in plan.entries) == 400 + 420 + 5
    assert plan.num_bytes == sum(plan.sizes) >= 400 + 420 + 5
    assert all(entry.offset % ALIGN == 0 and entry.begin % ALIGN == 0 for entry in plan.entries)


def test_pieces_larger_than_a_chunk_are_copied_and_hashed_whole():
    named = weights([(torch.int8, (2 * CHUNK_BYTES + 7,)), (torch.bfloat16, (CHUNK_BYTES,))])
    plan = plan_buckets(spec(named), 8 * CHUNK_BYTES)
    got = read(plan, write(plan, named))
    assert all(raw(got[name]) == raw(tensor) for name, tensor in named.items())


def test_memory_that_was_copied_into_buckets_can_be_freed_in_place():
    """As a trainer does to offload: a numpy view of a storage would forbid it for ever."""
    weight = torch.ones(1000)
    write(plan_buckets({"w": (weight.dtype, (1000,))}, 4096), {"w": weight})
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0


def test_checksum_depends_on_the_weights_alone():
    named = weights([(torch.int8, (5,)), (torch.int8, (6,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    assert len({checksum(write_one(plan, 0, named, old)) for old in (0, 1, 255)}) == 1


def test_strided_parameters_that_require_grad():
    named = {"w": torch.nn.Parameter(torch.randn(8, 6)), "t": torch.randn(6, 8).t(), "one": torch.randn(4)[::2][:1]}
    plan = plan_buckets(spec(named), ALIGN)
    got = read(plan, write(plan, named))
    assert all(torch.equal(got[name], tensor) for name, tensor in named.items())


def test_read_into_given_tensors_in_any_order():
    named = weights([(torch.float32, (50,)), (torch.float32, (50,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    written = write(plan, named)
    into = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    kept = dict(into)
    for bucket in reversed(range(len(written))):
        read_bucket(plan, bucket, written[bucket], into)
    assert all(into[name] is kept[name] and raw(into[name]) == raw(named[name]) for name in named)


def gpu_checksum(payload):
    return int(device_digest(payload)) & (1 << 64) - 1


@pytest.mark.parametrize("nbytes", [1, 21, 32 << 10, (96 << 10) + 13])
def test_every_byte_is_under_the_checksum(nbytes):
    payload = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))
    whole = checksum(payload)
    assert checksum(payload.clone()) == whole
    for position in {0, nbytes // 3, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            payload[position] ^= 1 << bit
            assert checksum(payload) != whole
            payload[position] ^= 1 << bit
    assert checksum(payload[:-1].clone()) != whole
    assert checksum(torch.cat([payload, payload.new_zeros(1)])) != whole


def test_errors_name_what_is_wrong():
    named = weights([(torch.float32, (20,)), (torch.float32, (30,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    payload = write(plan, named)[0]
    entry = plan.entries[0]
    with pytest.raises(
        ValueError, match=r"weight 'layers.0.weight': got torch.float32 \[4, 5\], expected float32 \[20\]"
    ):
        write_piece(entry, torch.zeros(4, 5), payload)
    with pytest.raises(ValueError, match=r"bucket 0: got a buffer of torch.uint8 \[79\], expected uint8 \[80\]"):
        write_piece(entry, named["layers.0.weight"], payload[:79])
    with pytest.raises(ValueError, match="weight 'layers.0.weight': got torch.float16"):
        read_bucket(plan, 0, payload, {"layers.0.weight": torch.zeros(20).half()})
    with pytest.raises(ValueError, match="'layers.0.weight': the tensor to read into is not contiguous"):
        read_bucket(plan, 0, payload, {"layers.0.weight": torch.zeros(40)[::2]})
    with pytest.raises(ValueError, match="bucket 9 is not in the plan, which has 2 buckets"):
        read_bucket(plan, 9, payload, {})
    with pytest.raises(ValueError, match=r"bucket 0: got a payload of torch.uint8 \[5\], expected uint8 \[80\]"):
        read_bucket(plan, 0, payload[:5], {})
    with pytest.raises(ValueError, match=r"buckets \[1\] of 2 are missing; they hold 'layers.1.weight'"):
        expect_all(plan, [0])
    with pytest.raises(ValueError, match="'w': got dtype torch.complex64, expected one of"):
        plan_buckets({"w": (torch.complex64, (1,))}, ALIGN)
    with pytest.raises(ValueError, match="bucket_bytes: got 100, expected a positive multiple of 64"):
        plan_buckets({}, 100)
    with pytest.raises(ValueError, match=r"checksum: got torch.float32 \[3\], expected contiguous uint8"):
        checksum(torch.zeros(3))


@pytest.mark.gpu
def test_cuda_weights():
    named = {"w": torch.randn(100_000, device="cuda"), "b": torch.randn(33, device="cuda").bfloat16()}
    plan = plan_buckets(spec(named), 100 << 10)
    into: dict[str, torch.Tensor] = {}
    for bucket, size in enumerate(plan.sizes):
        out = torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")
        for entry in plan.in_bucket(bucket):
            write_piece(entry, named[entry.name], out)
        assert checksum(out) == gpu_checksum(out.cpu())
        read_bucket(plan, bucket, out, into)
    assert all(into[name].is_cuda and torch.equal(into[name], tensor) for name, tensor in named.items())


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


def test_errors_name_what_is_wrong_with_differences():
    base = random_bytes(400)
    payload = encode_sparse(change(base, 2, [3, 90]), base, 2)
    assert payload is not None
    with pytest.raises(ValueError, match="got a bucket of 398 bytes, expected 400"):
        apply_sparse(payload, base[:398].copy())
    with pytest.raises(ValueError, match="got 7 bytes, expected a header"):
        apply_sparse(payload[:7], base)
    with pytest.raises(ValueError, match="the payload has an invalid header"):
        apply_sparse(base, base)
    with pytest.raises(ValueError, match="expected 44"):
        apply_sparse(payload[:-1], base)
    with pytest.raises(ValueError, match="got 400 and 398 bytes with elements of 2"):
        encode_sparse(base, base[:398], 2)
    with pytest.raises(ValueError, match="with elements of 3"):
        encode_sparse(base, base, 3)
    with pytest.raises(ValueError, match="contiguous uint8"):
        encode_sparse(base[::2], base[::2], 2)
