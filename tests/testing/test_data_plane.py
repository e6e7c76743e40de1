"""The plane in a line, and rows that any reader can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import headrace.testing
from headrace import Field, Kind, Schema, connect
from headrace.testing import SCHEMA, assert_rows, open_plane, plane, rows
from headrace.testing.data_plane import length_of

KEYS = [f"p{prompt}.{sample}" for prompt in range(8) for sample in range(4)]


@pytest.mark.parametrize("store", ["local", "shm"])
def test_rows_are_read_as_they_were_put(store: str) -> None:
    with plane(store=store, group_size=4) as client:
        client.put("train", KEYS, rows(KEYS))
        meta = client.claim("train", "train", list(SCHEMA), len(KEYS))
        batch = client.get(meta)
        assert_rows(batch, meta.keys)
        with pytest.raises(AssertionError):
            assert_rows(batch, meta.keys[::-1])
        with pytest.raises(AssertionError):
            assert_rows(batch, meta.keys, ["ids"])
    assert {length_of(key) for key in KEYS} >= {0} and max(map(length_of, KEYS)) > 1


def test_rows_of_a_schema_of_ones_own() -> None:
    schema = Schema([Field("x", Kind.PER_TOKEN, torch.int64), Field("y", Kind.PER_SAMPLE, torch.uint16, (3,))])
    with open_plane(block_rows=2) as opened, connect(opened.handle) as client:
        client.register("p", schema, ("a",))
        receipt = client.put("p", KEYS, rows(KEYS, schema=schema))
        assert_rows(client.get(receipt), KEYS, schema=schema)
    assert opened.handle.config.block_rows == 2 and opened.handle.config.timeout_s == 10.0


def test_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="blok_rows"):
        open_plane(blok_rows=2)


def test_all_names_are_there_and_the_package_needs_no_pytest() -> None:
    assert [name for name in headrace.testing.__all__ if getattr(headrace.testing, name) is None] == []
    assert set(headrace.testing.__all__) <= set(dir(headrace.testing))
    with pytest.raises(AttributeError, match="has no attribute 'plan'"):
        headrace.testing.plan  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    for path in Path(headrace.testing.__file__).parent.glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
        assert "pytest" not in [name.name for node in imports for name in node.names]
