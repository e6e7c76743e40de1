"""Weight buckets: every tensor back with the same bits, and a name for whatever is wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.buckets import ALIGN, BucketPlan, expect_all, fill_bucket, plan_buckets, read_bucket
from headrace.codecs.messages import decode, encode
from headrace.codecs.schema import DTYPES


def spec(named):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}


def write(plan, named):
    """(buffer, checksum) of each bucket, in reused memory full of another version's bytes."""
    written = []
    for bucket, nbytes in enumerate(plan.sizes):
        out = np.full(nbytes + 7, 0xAB, dtype=np.uint8)
        written.append((out, fill_bucket(plan, bucket, named, out)))
    return written


def read(plan, written):
    into: dict[str, torch.Tensor] = {}
    for bucket, (buffer, checksum) in enumerate(written):
        read_bucket(plan, bucket, buffer, into, checksum=checksum)
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


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 8), st.integers(0, 2**32))
def test_weights_round_trip(tensors, lines, seed):
    named = weights(tensors, seed)
    plan = plan_buckets(spec(named), lines * ALIGN)
    assert plan == plan_buckets(spec(named), lines * ALIGN)
    assert all(size <= lines * ALIGN for size in plan.sizes)
    assert decode(encode(plan), BucketPlan) == plan
    assert plan.names == tuple(named)
    got = read(plan, write(plan, named))
    assert list(got) == list(named)
    for name, tensor in named.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape and raw(got[name]) == raw(tensor)


def test_large_tensors_are_split_and_buckets_are_full():
    named = weights([(torch.float32, (100,)), (torch.bfloat16, (30, 7)), (torch.int8, (5,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    assert all(size > ALIGN for size in plan.sizes[:-1])  # full, but for what aligns the next tensor
    assert sum(entry.nbytes for entry in plan.entries) == 400 + 420 + 5
    assert all(entry.offset % ALIGN == 0 and entry.begin % ALIGN == 0 for entry in plan.entries)


def test_checksum_depends_on_the_weights_alone():
    named = weights([(torch.int8, (5,)), (torch.int8, (6,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    assert len({fill_bucket(plan, 0, named, np.full(2 * ALIGN, old, dtype=np.uint8)) for old in (0, 1, 255)}) == 1


def test_strided_parameters_that_require_grad():
    named = {"w": torch.nn.Parameter(torch.randn(8, 6)), "t": torch.randn(6, 8).t()}
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
        buffer, checksum = written[bucket]
        buffer.flags.writeable = False
        read_bucket(plan, bucket, buffer, into, checksum=checksum)
    assert all(into[name] is kept[name] and raw(into[name]) == raw(named[name]) for name in named)


def test_every_byte_is_under_the_checksum():
    named = weights([(torch.int8, (5,)), (torch.float32, (9,))])
    plan = plan_buckets(spec(named), 4 * ALIGN)
    [(buffer, checksum)] = write(plan, named)
    for position in range(plan.sizes[0]):
        buffer[position] ^= 1
        into = {}
        with pytest.raises(ValueError, match="bucket 0: xxh3 of the bytes read is"):
            read_bucket(plan, 0, buffer, into, checksum=checksum)
        assert not into
        buffer[position] ^= 1


def test_errors_name_what_is_wrong():
    named = weights([(torch.float32, (20,)), (torch.float32, (30,))])
    plan = plan_buckets(spec(named), 2 * ALIGN)
    written = write(plan, named)
    out = np.zeros(2 * ALIGN, dtype=np.uint8)
    with pytest.raises(ValueError, match="weight 'layers.1.weight': missing, expected float32 .30."):
        fill_bucket(plan, 1, {"layers.0.weight": named["layers.0.weight"]}, out)
    with pytest.raises(
        ValueError, match=r"weight 'layers.0.weight': got torch.float32 \[4, 5\], expected float32 \[20\]"
    ):
        fill_bucket(plan, 0, {**named, "layers.0.weight": torch.zeros(4, 5)}, out)
    buffer, checksum = written[0]
    with pytest.raises(ValueError, match="weight 'layers.0.weight': got torch.float16"):
        read_bucket(plan, 0, buffer, {"layers.0.weight": torch.zeros(20).half()}, checksum=checksum)
    with pytest.raises(ValueError, match="'layers.0.weight': the tensor to read into is not contiguous"):
        read_bucket(plan, 0, buffer, {"layers.0.weight": torch.zeros(40)[::2]}, checksum=checksum)
    with pytest.raises(ValueError, match="bucket 9: the plan has 2 buckets"):
        read_bucket(plan, 9, buffer, {}, checksum=checksum)
    with pytest.raises(ValueError, match=r"bucket 0: got a buffer of uint8 \[5\], expected uint8 \[80\]"):
        read_bucket(plan, 0, buffer[:5], {}, checksum=checksum)
    with pytest.raises(ValueError, match=r"buckets \[1\] of 2 are missing; they hold 'layers.1.weight'"):
        expect_all(plan, [0])
    with pytest.raises(ValueError, match="'w': got dtype torch.complex64, expected one of"):
        plan_buckets({"w": (torch.complex64, (1,))}, ALIGN)
    with pytest.raises(ValueError, match="bucket_bytes: got 100, expected a positive multiple of 64"):
        plan_buckets({}, 100)


@pytest.mark.gpu
def test_cuda_weights():
    named = {"w": torch.randn(100, device="cuda")}
    plan = plan_buckets(spec(named), ALIGN)
    assert torch.equal(read(plan, write(plan, named))["w"], named["w"].cpu())
