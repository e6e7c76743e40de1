"""Lists the regions of a weight that ranks and workers have, for usual ways to split a model besides `held`.

    vocabulary     rows of an embedding that is padded before it is split
    gated          gate and up matrices in one parameter (Megatron's linear_fc1, vLLM's gate_up_proj)
    gated_experts  the same for stacked experts (Megatron's weight1, vLLM's w13_weight)
    expert_boxes   experts that are separate tensors in a checkpoint
    grouped_heads  queries, keys and values in one parameter, by groups of heads that share a key (Megatron)
    fused_heads    queries, keys and values in one parameter, one after the other (vLLM's qkv_proj)

All shapes are those of the Hugging Face model, in which experts are stacked: gate and up matrices `[experts, 2 * rows,
columns]`, with the rows of gate first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.actors.weight_sync.plan.regions import Box, Region, cut, lengths, place, whole
from headrace.codecs.integers import round_up


def vocabulary(
    name: str, shape: Sequence[int], num: int, index: int, multiple: int = 1, tensor: str = ""
) -> Iterator[Region]:
    """Yield the region of the rows of an embedding that part `index` of `num` has. The rows are padded to a multiple of
    `multiple` (64 in vLLM) and of `num`; the padding is in no region."""
    rows = round_up(round_up(shape[0], multiple), num) // num
    start, stop = (min(part * rows, shape[0]) for part in (index, index + 1))
    if start < stop:
        yield place(name, ((start, stop), *whole(shape[1:])), tensor)


def gated(gate: str, up: str, shape: Sequence[int], num: int, index: int, tensor: str) -> Iterator[Region]:
    """Yield the regions of a gate and an up matrix, or biases, of `shape` each. `tensor` has the part of the gate's
    rows above that of the up matrix."""
    box = cut(whole(shape), 0, num, index)
    rows, *rest = lengths(box)
    for number, name in enumerate((gate, up)):
        if rows:
            yield place(name, box, tensor, (2 * rows, *rest), (number * rows,))


def gated_experts(
    name: str, shape: Sequence[int], experts: tuple[int, int], num: int, index: int, tensor: str
) -> Iterator[Region]:
    """Yield the regions of stacked gate and up matrices: part `index` of `num` of the rows of each.

    experts: the first expert, and one past the last. `tensor` is `[experts, 2 * rows / num, columns]`.
    """
    half = shape[1] // 2
    rows = cut(((0, half),), 0, num, index)[0]
    width, size = rows[1] - rows[0], experts[1] - experts[0]
    for number in range(2 if size and width else 0):
        box = (experts, (number * half + rows[0], number * half + rows[1]), *whole(shape[2:]))
        yield place(name, box, tensor, (size, 2 * width, *shape[2:]), (0, number * width))


def expert_boxes(name: str, shape: Sequence[int], rows: tuple[int, int], tensors: dict[int, str]) -> Iterator[Region]:
    """Yield the regions of single experts' matrices that a checkpoint stacks: `rows` of axis 1 of each.

    tensors: name of the local tensor of each expert, for example that of its `up_proj`.
    """
    for expert, tensor in tensors.items():
        box = ((expert, expert + 1), rows, *whole(shape[2:]))
        yield place(name, box, tensor)


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a layer's attention, and the names of its query, key and value matrices, or of their biases."""

    names: tuple[str, str, str]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    columns: tuple[int, ...]
    """Shape of one row: `(hidden_size,)` for matrices, `()` for biases."""

    def box(self, first: int, num: int) -> Box:
        """Return the box of `num` heads of a matrix, starting at head `first`."""
        return ((first * self.head_dim, (first + num) * self.head_dim), *whole(self.columns))


def grouped_heads(heads: Heads, num: int, index: int, tensor: str) -> Iterator[Region]:
    """Yield the regions of a Megatron parameter: the queries, the key and the value of one group, then of the next.

    Each of the `num` parts has the same number of groups.
    """
    groups, queries = heads.num_kv_heads // num, heads.num_heads // heads.num_kv_heads
    shape = (groups * (queries + 2) * heads.head_dim, *heads.columns)
    for number in range(groups):
        group, row = index * groups + number, number * (queries + 2)
        parts = zip(heads.names, (queries, 1, 1), (0, queries, queries + 1), strict=True)
        for name, size, after in parts:
            yield place(name, heads.box(group * size, size), tensor, shape, ((row + after) * heads.head_dim,))


def fused_heads(heads: Heads, num: int, index: int, tensor: str) -> Iterator[Region]:
    """Yield the regions of a vLLM parameter: the queries of part `index` of `num`, then its keys, then its values. With
    more parts than keys, several parts have a copy of the same key."""
    queries, keys = heads.num_heads // num, max(1, heads.num_kv_heads // num)
    first = index * keys if num <= heads.num_kv_heads else index // (num // heads.num_kv_heads)
    shape = ((queries + 2 * keys) * heads.head_dim, *heads.columns)
    spans = ((index * queries, queries, 0), (first, keys, queries), (first, keys, queries + keys))
    for name, (start, size, after) in zip(heads.names, spans, strict=True):
        yield place(name, heads.box(start, size), tensor, shape, (after * heads.head_dim,))
