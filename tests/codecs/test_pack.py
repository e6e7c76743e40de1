"""pack: what users hold, checked against the schema; one clear sentence for what does not fit."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from headrace.codecs.batch import Jagged, Ragged
from headrace.codecs.jagged import concat, from_padded, pack, select_rows, slice_rows, to_padded, unpack
from headrace.codecs.schema import Field, Kind, Schema

SCHEMA = Schema(
    [
        Field("input_ids", Kind.PER_TOKEN, torch.int32),
        Field("mask", Kind.PER_TOKEN, torch.uint8),
        Field("logprobs", Kind.PER_TOKEN, torch.float32),
        Field("experts", Kind.PER_TOKEN, torch.int8, (2, 2)),
        Field("reward", Kind.PER_SAMPLE, torch.float32),
        Field("done", Kind.PER_SAMPLE, torch.bool, (2,)),
        Field("hidden", Kind.PER_SAMPLE, torch.bfloat16, (2,)),
        Field("image", Kind.RAGGED, torch.uint8, ndim=2),
        Field("log", Kind.OBJECT),
    ]
)


def test_python_lists_become_the_fields_dtype():
    batch = pack(
        SCHEMA,
        {
            "input_ids": [[1, 2], [], (3,)],
            "mask": [[1, 0], [], [True]],
            "logprobs": [[-0.1, 2], [], [float("nan")]],
            "experts": [[[[1, 2], [3, 4]]] * 2, [], [[[5, 6], [7, 8]]]],
            "reward": [1, 0.5, np.float64(0.25)],
            "done": [[True, False]] * 3,
            "hidden": [[0.5, 1], [1e-3, -2], [0, 0]],
            "image": [[[1, 2]], [[3], [4]], [[]]],
            "log": [{"a": [1, "b"]}, None, "c"],
        },
    )
    assert batch.jagged("input_ids").values.tolist() == [1, 2, 3]
    assert batch.jagged("experts").lengths.tolist() == [2, 0, 1]
    assert batch.jagged("experts").values.shape == (3, 2, 2)
    assert torch.equal(batch.jagged("logprobs").values[:2], torch.tensor([-0.1, 2.0]))
    assert batch.tensor("reward").tolist() == [1, 0.5, 0.25]
    assert torch.equal(batch.tensor("hidden"), torch.tensor([[0.5, 1], [1e-3, -2], [0, 0]], dtype=torch.bfloat16))
    assert batch.ragged("image").shapes.tolist() == [[1, 2], [2, 1], [1, 0]]
    assert batch.objects("log") == [{"a": [1, "b"]}, None, "c"]
    assert [field.dtype for field in batch.schema.values()] == [field.dtype for field in SCHEMA.values()]


def test_numpy_integers_are_narrowed_where_they_fit():
    rows = [np.array([1, 2], dtype=np.int64), np.array([2**31 - 1], dtype=np.uint64)]
    for given in (rows, [rows[0], [3]], np.array([[1, 2], [3, 4]]), np.array(rows, dtype=object)):
        assert pack(SCHEMA, {"input_ids": given}).jagged("input_ids").values.dtype == torch.int32
    with pytest.raises(ValueError, match="field 'mask': row 1 holds 256, expected 0 to 255 .uint8."):
        pack(SCHEMA, {"mask": [np.array([1]), np.array([256])]})


def test_integer_tensors_are_narrowed_where_they_fit():
    rows = [torch.arange(2), torch.arange(0), torch.tensor([2**31 - 1])]
    jagged = Jagged(torch.cat(rows), np.array([2, 0, 1]))
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for given in (rows, [rows[0].to(torch.int16), *rows[1:]], [rows[0], [], [2**31 - 1]], jagged, nested):
        values = pack(SCHEMA, {"input_ids": given}).jagged("input_ids").values
        assert values.dtype == torch.int32 and values.tolist() == [0, 1, 2**31 - 1]
    experts = torch.arange(24).reshape(2, 2, 3, 2).transpose(1, 2)  # not contiguous
    values = pack(SCHEMA, {"experts": experts}).jagged("experts").values
    assert values.is_contiguous() and torch.equal(values.long(), experts.reshape(6, 2, 2))


@pytest.mark.parametrize(
    "given",
    [
        [torch.tensor([1, 2]), torch.arange(0), torch.tensor([3, 256])],
        [torch.tensor([1], dtype=torch.int16), torch.arange(2), torch.tensor([256])],
        torch.tensor([[1, 2], [3, 4], [5, 256]]),
        np.array([[1, 2], [3, 4], [5, 256]]),
        Jagged(torch.tensor([1, 2, 256]), np.array([1, 1, 1])),
        torch.nested.nested_tensor([torch.ones(n).long() * 64 * n for n in (1, 2, 4)], layout=torch.jagged),
    ],
    ids=["rows", "rows of several dtypes", "dense", "array", "jagged", "nested"],
)
def test_an_integer_that_does_not_fit_is_named_with_its_row(given: object):
    with pytest.raises(ValueError, match="field 'mask': row 2 holds 256, expected 0 to 255 .uint8."):
        pack(SCHEMA, {"mask": given})


def test_an_element_that_does_not_fit_is_named_with_its_row():
    shapes = np.array([[1, 2], [0, 3], [1, 1]])
    with pytest.raises(ValueError, match="field 'image': row 2 holds -1, expected 0 to 255 .uint8."):
        pack(SCHEMA, {"image": Ragged(torch.tensor([1, 2, -1]), shapes)})


def test_dense_tensors():
    experts = torch.arange(2 * 3 * 4, dtype=torch.int8).reshape(2, 3, 2, 2)
    batch = pack(SCHEMA, {"experts": experts, "image": torch.zeros(2, 5, 4, dtype=torch.uint8)})
    assert torch.equal(batch.jagged("experts").values, experts.reshape(6, 2, 2))
    assert batch.jagged("experts").lengths.tolist() == [3, 3]
    assert batch.ragged("image").shapes.tolist() == [[5, 4], [5, 4]]


def test_nested_tensors():
    rows = [torch.randn(2), torch.randn(0), torch.randn(3)]
    expected = torch.cat(rows)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    gaps = torch.nested.narrow(
        torch.arange(12.0).reshape(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1]), layout=torch.jagged
    )
    assert torch.equal(pack(SCHEMA, {"logprobs": jagged}).jagged("logprobs").values, expected)
    assert pack(SCHEMA, {"logprobs": gaps}).jagged("logprobs").values.tolist() == [0, 1, 5, 6, 10]
    # Here the last dimension is the jagged one: images [2, L], not tokens.
    images = torch.nested.nested_tensor(
        [torch.ones(2, n, dtype=torch.uint8) for n in (3, 1)], layout=torch.jagged, dtype=torch.uint8
    )
    assert pack(SCHEMA, {"image": images}).ragged("image").shapes.tolist() == [[2, 3], [2, 1]]
    with pytest.raises(ValueError, match=r"field 'mask': row 0 has shape \[2, 3\], expected \[L\]"):
        pack(SCHEMA, {"mask": images})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors():
    rows = [torch.randn(2), torch.randn(3)]
    batch = pack(SCHEMA, {"logprobs": torch.nested.as_nested_tensor(rows)})
    assert torch.equal(batch.jagged("logprobs").values, torch.cat(rows))


def test_tensordict_with_objects():
    log = NonTensorStack({"role": "user"}, ["a", "b"])
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    data = TensorDict({"logprobs": rows, "log": log}, batch_size=[2])
    batch = pack(SCHEMA, data)
    assert batch.objects("log") == [{"role": "user"}, ["a", "b"]]
    assert batch.lengths is not None and batch.lengths.tolist() == [2, 3]


def test_lazily_stacked_tensordict_of_ragged_rows():
    rows = [TensorDict({"logprobs": torch.ones(n), "log": f"row {n}"}, []) for n in (2, 0, 3)]
    batch = pack(SCHEMA, LazyStackedTensorDict(*rows, stack_dim=0))
    assert batch.objects("log") == ["row 2", "row 0", "row 3"]
    assert batch.lengths is not None and batch.lengths.tolist() == [2, 0, 3]
    rows[1] = TensorDict({"log": "x"}, [])
    with pytest.raises(ValueError, match="field 'logprobs', row 1: it is missing there, but other rows have it"):
        pack(SCHEMA, LazyStackedTensorDict(*rows, stack_dim=0))


def test_read_only_arrays_are_copied_not_warned_of():
    array = np.ones(3, dtype=np.float32)
    array.flags.writeable = False
    column = pack(SCHEMA, {"reward": array}).tensor("reward")
    assert not np.shares_memory(column.numpy(), array)


def test_contiguous_input_is_not_copied():
    dense = torch.randn(3)
    assert pack(SCHEMA, {"reward": dense}).tensor("reward").data_ptr() == dense.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_float64_and_integers_fit_a_field_of_floats(dtype):
    field = Field("r", Kind.PER_SAMPLE, dtype)
    for values in (np.array([0.5, -2.0, np.inf]), torch.tensor([0.5, -2.0, np.inf], dtype=torch.float64)):
        assert pack(Schema([field]), {"r": values}).tensor("r").tolist() == [0.5, -2.0, np.inf]
        assert pack(Schema([field]), {"r": values[::2]}).tensor("r").dtype == dtype
    for values in (np.array([1, -7]), torch.tensor([1, -7]), np.array([1, 2], np.uint8), [np.int64(4), 2]):
        assert pack(Schema([field]), {"r": values}).tensor("r").tolist() == list(values)
    wide = pack(Schema([Field("r", Kind.PER_SAMPLE, torch.float64)]), {"r": np.array([2**60])})
    assert wide.tensor("r").tolist() == [2.0**60]
    with pytest.raises(ValueError, match=f"row 1 holds {2**53 + 1}, which float64 cannot hold"):
        pack(Schema([Field("r", Kind.PER_SAMPLE, torch.float64)]), {"r": np.array([1, 2**53 + 1])})


@pytest.mark.parametrize("column", [np.array(["a", "bc"], dtype=object), np.array(["a", "bc"])], ids=["object", "text"])
def test_a_column_of_numpy_text_in_a_tensordict_is_one_text_a_row(column):
    schema = Schema([Field("text", Kind.OBJECT)])
    for data in (TensorDict({"text": column}, batch_size=2), {"text": column}):
        assert pack(schema, data).objects("text") == ["a", "bc"]


def test_empty_batches():
    batch = pack(SCHEMA, {name: [] for name in SCHEMA})
    assert batch.num_rows == 0 and len(batch) == len(SCHEMA)
    assert batch.jagged("experts").values.shape == (0, 2, 2)
    assert pack(SCHEMA, {}, num_rows=3).num_rows == 3
    assert pack(SCHEMA, TensorDict({}, batch_size=[4])).num_rows == 4


GOOD = {"input_ids": [[1, 2], [3]]}
BAD = {
    "another dtype": (
        {"input_ids": [torch.zeros(2)]},
        "'input_ids': row 0 has dtype torch.float32, expected torch.int32",
    ),
    "narrower float": ({"logprobs": torch.zeros(1, 2, dtype=torch.float16)}, "dtype torch.float16, expected"),
    "float64 too large": (
        {"logprobs": [torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 1e300], dtype=torch.float64)]},
        "row 1 holds 1e[+]300, which float32 cannot hold",
    ),
    "integers not exact": ({"logprobs": np.array([[1], [2**24 + 1]])}, "row 1 holds 16777217, which float32 cannot"),
    "bool for int": ({"mask": [torch.ones(2, dtype=torch.bool)]}, "row 0 has dtype torch.bool, expected torch.uint8"),
    "second row's dtype": (
        {"input_ids": [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float32)]},
        "row 1 has dtype torch.float32",
    ),
    "int too large": ({"input_ids": [[1], [2**40]]}, "row 1 holds 1099511627776, expected -2147483648 to 2147483647"),
    "float for int": ({"input_ids": [[1], [1.5]]}, "row 1 is a list with values of type float64, expected int32"),
    "numpy float16": ({"logprobs": [np.zeros(2, np.float16)]}, "row 0 is a numpy array of dtype float16, expected"),
    "float too large": ({"logprobs": [[1e300]]}, "row 0 holds 1e[+]300, which float32 cannot hold"),
    "int not exact": ({"logprobs": [[2**24 + 1]]}, "row 0 holds 16777217, which float32 cannot hold"),
    "int for bool": ({"done": [[1, 0]]}, "'done': .* int64, expected bool"),
    "None among numbers": ({"input_ids": [[1, None]]}, "'input_ids': row 0 .* object, expected int32"),
    "text for numbers": ({"reward": ["high"]}, "'reward': row 0 is a str"),
    "ragged lists": ({"experts": [[[1], [1, 2]]]}, "'experts': row 0 is not an array of numbers"),
    "missing token dimension": ({"input_ids": torch.zeros(3, dtype=torch.int32)}, r"shape \[3\], expected \[N, L\]"),
    "one dimension more": ({"input_ids": [[[1, 2]]]}, r"row 0 has shape \[1, 2\], expected \[L\]"),
    "trailing shape": ({"experts": [torch.zeros(2, 2, dtype=torch.int8)]}, r"row 0 .* \[2, 2\], expected \[L, 2, 2\]"),
    "second row's shape": (
        {"logprobs": [np.zeros(2, np.float32), np.zeros((2, 2), np.float32)]},
        r"row 1 has shape \[2, 2\], expected \[L\]",
    ),
    "sample's shape": ({"reward": [[1.0, 2.0]]}, r"'reward': row 0 has shape \[2\], expected \[\]"),
    "a scalar for rows": ({"reward": torch.tensor(1.0)}, r"'reward': the dense tensor has shape \[\], expected \[N\]"),
    "ndim": ({"image": [[1, 2]]}, r"'image': row 0 has shape \[2\], expected \[\*, \*\]"),
    "list of scalar tensors": ({"input_ids": [[torch.tensor(1)]]}, "row 0 is a list of tensors, expected one tensor"),
    "sparse": ({"logprobs": [torch.zeros(3).to_sparse()]}, "row 0 has layout torch.sparse_coo, expected a plain"),
    "no rows at all": ({"input_ids": 5}, "'input_ids': got a int, expected a list of rows"),
    "lengths differ": (
        {"input_ids": [[1], [2, 3]], "logprobs": [[1.0], [2.0]]},
        "'logprobs', row 1: got 1 tokens, expected 2 as in field 'input_ids'",
    ),
    "row counts differ": ({**GOOD, "reward": [1.0]}, "'reward': got 1 rows, expected 2"),
    "unknown field": ({"inputs_ids": [[1]]}, "unknown field 'inputs_ids', did you mean 'input_ids'.; the schema has"),
    "objects as text": ({"log": "ab"}, "'log': got a str, expected a list of objects"),
    "objects as tensor": ({"log": torch.zeros(2)}, "'log': got a Tensor, expected a list of objects"),
    "nothing": ({}, "no fields and no number of rows"),
    "no mapping": ([1], "fields: got a list, expected a mapping or a TensorDict"),
    "column's lengths": (
        {"logprobs": Jagged(torch.zeros(3), np.array([1, 1]))},
        r"values has shape \[3\], expected \[2\]",
    ),
    "negative lengths": (
        {"logprobs": Jagged(torch.zeros(0), np.array([1, -1]))},
        "lengths hold -1, expected 0 or more",
    ),
    "column's shapes": (
        {"image": Ragged(torch.zeros(3, dtype=torch.uint8), np.array([[2, 2]]))},
        r"values has shape \[3\], expected \[4\]",
    ),
    "no batch dimension": (TensorDict({"reward": torch.tensor(1.0)}, []), "batch size .., expected one dimension"),
}


@pytest.mark.parametrize(("data", "sentence"), BAD.values(), ids=BAD)
def test_one_clear_sentence(data, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        pack(SCHEMA, data)
    assert "\n" not in str(caught.value)


def test_row_count_asked_for():
    with pytest.raises(ValueError, match="field 'input_ids': got 2 rows, expected 3"):
        pack(SCHEMA, GOOD, num_rows=3)


def test_unpack_gives_views():
    batch = pack(SCHEMA, {"input_ids": [[1, 2], [3]], "reward": [1.0, 2.0]})
    rows = unpack(batch)
    rows["input_ids"][1][0] = 9
    assert batch.jagged("input_ids").values.tolist() == [1, 2, 9]
    assert [row.tolist() for row in rows["reward"]] == [1.0, 2.0]


def test_slices_are_views_and_rows_must_be_there():
    batch = pack(SCHEMA, GOOD)
    part = slice_rows(batch, 1, 2)
    assert part.jagged("input_ids").values.data_ptr() == batch.jagged("input_ids").values[2:].data_ptr()
    for start, stop in ((-1, 1), (1, 3), (2, 1)):
        with pytest.raises(ValueError, match="expected 0 <= start <= stop <= 2"):
            slice_rows(batch, start, stop)
    for indices in ([2], [-1]):
        with pytest.raises(ValueError, match="expected 0 to 1, the batch's rows"):
            select_rows(batch, indices)


def test_concat_wants_one_schema():
    with pytest.raises(ValueError, match="concat: batch 1 has .*'reward'.*, expected .*'input_ids'.* as in batch 0"):
        concat([pack(SCHEMA, GOOD), pack(SCHEMA, {"reward": [1.0]})])
    with pytest.raises(ValueError, match="no batches"):
        concat([])


def test_padding_refuses_what_it_cannot_pad():
    batch = pack(SCHEMA, {**GOOD, "reward": [1.0, 2.0]})
    with pytest.raises(ValueError, match="pad_to: got 1, but row 0 has 2 tokens"):
        to_padded(batch, pad_to=1)
    with pytest.raises(ValueError, match="field 'reward' is per_sample, but only per_token"):
        to_padded(batch, ["reward"])
    with pytest.raises(ValueError, match="multiple_of: got 0"):
        to_padded(batch, multiple_of=0)
    padded, lengths = to_padded(batch, pad_to=4)
    with pytest.raises(ValueError, match="lengths: got 1 to 5, expected 0 to 4"):
        from_padded(SCHEMA, padded, lengths + torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="field 'reward': expected a per_token field"):
        from_padded(SCHEMA, {"reward": torch.zeros(2, 2)}, lengths)
    with pytest.raises(ValueError, match=r"got shape \[2, 4\], expected \[1, Lmax"):
        from_padded(SCHEMA, padded, lengths[:1])


def test_pad_value_is_the_schemas():
    schema = Schema([Field("ids", Kind.PER_TOKEN, torch.int32, pad_value=-7)])
    padded, lengths = to_padded(pack(schema, {"ids": [[1], [2, 3]]}), multiple_of=3)
    assert padded["ids"].tolist() == [[1, -7, -7], [2, 3, -7]]
    assert lengths.tolist() == [1, 2] and lengths.dtype == torch.int64


@pytest.mark.parametrize(
    ("dtype", "pad"), [(torch.uint8, -1), (torch.int8, 200), (torch.bool, 2), (torch.float16, 1e6)]
)
def test_pad_value_must_fit_the_dtype(dtype, pad):
    with pytest.raises(ValueError, match="field 'x': pad value .* does not fit"):
        Field("x", Kind.PER_TOKEN, dtype, pad_value=pad)


@pytest.mark.gpu
def test_cuda_rows_come_to_the_cpu():
    rows = [torch.randn(n, device="cuda", requires_grad=True) for n in (2, 0, 3)]
    values = pack(SCHEMA, {"logprobs": rows}).jagged("logprobs").values
    assert values.device.type == "cpu" and torch.equal(values, torch.cat([row.detach().cpu() for row in rows]))
