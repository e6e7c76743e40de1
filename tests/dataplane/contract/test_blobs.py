"""The data plane's contract, the same over every store: pictures are stored once and freed with their last row."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch

from headrace.codecs.blobs import Blob, BlobRows, blob_field, references_of
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.errors import BlobsMissing, InvalidArgument, KeysNotFound, RowsCleared, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.tests.dataplane.planes import OTHER_STORES

IMAGES = blob_field(
    "images",
    [
        Field("pixels", Kind.RAGGED, torch.bfloat16, ndim=2),
        Field("grid", Kind.PER_SAMPLE, torch.int32, trailing=(3,)),
        Field("num_tokens", Kind.PER_SAMPLE, torch.int32),
    ],
)
SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), IMAGES])
DIM = 24


def picture(seed: int, patches: int = 64) -> Blob:
    pixels = torch.randn(patches, DIM, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    grid = torch.tensor([1, patches // 4, 4], dtype=torch.int32)
    return Blob(IMAGES, {"pixels": pixels, "grid": grid, "num_tokens": torch.tensor(patches // 4, dtype=torch.int32)})


def columns(listed: list[list[Blob]]) -> dict[str, Any]:
    return {"ids": [torch.arange(3)] * len(listed), "images": listed}


def test_digests_of_large_blobs_are_the_same_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [picture(seed, 512).name for seed in range(8)]
    monkeypatch.setattr("headrace.codecs.blobs.THREADED_BYTES", 1)
    blobs = [picture(seed, 512) for seed in range(8)]
    references, found = references_of(IMAGES, [[blobs[0], blobs[1]], [], [*blobs[2:], blobs[0]]])
    assert list(references.names) == alone == [*found] and references.counts.tolist() == [2, 0, 7]


def names_of(found: BlobRows, row: int) -> list[str]:
    """The digests of what was read for one row, computed from what was read."""
    pixels, grid, num = (found.blobs[name] for name in ("pixels", "grid", "num_tokens"))
    ends = torch.from_numpy(pixels.shapes.prod(axis=1)).cumsum(0).tolist()  # type: ignore[union-attr]
    names = []
    for i in found.of(row).tolist():
        shape = pixels.shapes[i].tolist()  # type: ignore[union-attr]
        values = pixels.values[ends[i] - shape[0] * shape[1] : ends[i]].view(shape)  # type: ignore[union-attr]
        names.append(Blob(IMAGES, {"pixels": values, "grid": grid[i], "num_tokens": num[i]}).name)  # type: ignore[index]
    return names


def bytes_used(client: Any) -> int:
    return client.status().bytes_used


@pytest.fixture
def pictures(client: Any, partition: str) -> str:
    """A partition whose rows have pictures. `client` checks that nothing is left of it."""
    client.register(f"{partition}p", SCHEMA, ("train",))
    return f"{partition}p"


@pytest.mark.also_over(*OTHER_STORES)
def test_pictures_are_stored_once_read_exactly_and_freed_with_their_last_row(client: Any, pictures: str) -> None:
    red, blue = picture(1, 640), picture(2, 64)
    own = red.batch.ragged("pixels").values.nbytes
    first = client.put(pictures, ["a.0", "a.1", "a.2"], columns([[red, blue], [], [blue, red, blue]]))
    used = bytes_used(client)
    second = client.put(pictures, ["b.0", "b.1"], columns([[picture(1, 640)], [blue]]))
    assert own < used < 2 * own and bytes_used(client) - used < own / 10
    found = client.get_blobs(first.concat(second), "images")
    listed = [[red, blue], [], [blue, red, blue], [red], [blue]]
    assert [names_of(found, row) for row in range(5)] == [[blob.name for blob in row] for row in listed]
    assert found.blobs.num_rows == 2
    only = client.get_blobs(second, "images", ["grid"])
    assert list(only.blobs) == ["grid"] and only.of(0).tolist() == [0] and only.of(1).tolist() == [1]
    client.clear(pictures, ["a.0", "a.2"])
    assert names_of(client.get_blobs(second, "images"), 0) == [red.name]
    client.clear(pictures, ["b.0"])
    assert bytes_used(client) < own
    stale = client.lookup(pictures, ["b.1"], ["images"])
    client.clear(pictures, ["b.1"])
    with pytest.raises((KeysNotFound, RowsCleared)):
        client.get_blobs(stale, "images")
    client.clear(pictures)
    assert bytes_used(client) == 0


def test_every_way_to_drop_a_row_drops_its_references(client: Any, pictures: str) -> None:
    red, blue = picture(1, 640), picture(2, 640)
    meta = client.put(pictures, ["a.0", "a.1"], columns([[red], [red]]))
    client.put(pictures, ["a.0"], columns([[blue]]), replace=True)
    assert names_of(client.get_blobs(client.lookup(pictures, ["a.0", "a.1"]), "images"), 0) == [blue.name]
    client.free(pictures, ["a.1"])
    with pytest.raises((KeysNotFound, RowsCleared)):
        client.get_blobs(meta.select([1]), "images")
    client.put(pictures, ["a.1"], columns([[blue]]))
    one = bytes_used(client)
    client.put(pictures, ["c.0"], columns([[red]]), versions=0)
    client.clear_stale(pictures, "train", ["images"], min_version=1)
    client.register(pictures, Schema([*SCHEMA.values(), Field("x", Kind.PER_SAMPLE, torch.int32)]), redefine=True)
    assert one > 0 and bytes_used(client) == 0
    client.unregister(pictures)


def test_wrong_references_are_refused_and_name_the_picture(client: Any, pictures: str) -> None:
    red = picture(1)
    meta = client.put(pictures, ["a.0"], columns([[red]]))
    digests = client.get(meta, ["images"])["images"]
    copied = client.put(pictures, ["b.0"], {"images": digests})
    client.clear(pictures, ["a.0"])
    assert names_of(client.get_blobs(copied, "images"), 0) == [red.name]
    client.clear(pictures, ["b.0"])
    with pytest.raises(BlobsMissing, match=red.name):
        client.put(pictures, ["b.0"], {"images": digests})
    with pytest.raises(SchemaMismatch, match="row 0: got a str, expected a list of Blobs"):
        client.put(pictures, ["b.0"], {"images": [["red"]]})
    with pytest.raises(InvalidArgument, match="without '#'; blobs are put and cleared with their rows"):
        client.clear(f"{pictures}#images")
    with pytest.raises(InvalidArgument, match="field: got 'ids', expected a field with blobs"):
        client.get_blobs(copied, "ids")
    assert bytes_used(client) == 0


def test_a_picture_that_is_freed_during_a_put_is_put_again(
    client: Any, plane: DataPlane, pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = picture(1)
    client.put(pictures, ["a.0"], columns([[red]]))
    with connect(plane.handle) as other:
        operations = other._operations.of(pictures)
        place, freed = operations._place, []

        def placed(*arguments: Any) -> Any:  # The directory has just said that the picture is stored.
            if not freed:
                freed.append(client.clear(pictures, ["a.0"]))
            return place(*arguments)

        monkeypatch.setattr(operations, "_place", placed)
        meta = other.put(pictures, ["b.0"], columns([[red]]))
        assert freed and names_of(other.get_blobs(meta, "images"), 0) == [red.name]
    client.clear(pictures)


def test_the_asyncio_client_reads_pictures(plane: DataPlane, client: Any, pictures: str) -> None:
    red = picture(1)

    async def use() -> BlobRows:
        async with connect_async(plane.handle) as other:
            meta = await other.put(pictures, ["a.0"], columns([[red, red]]))
            return await other.get_blobs(meta, "images")

    assert names_of(asyncio.run(use()), 0) == [red.name] * 2
    client.clear(pictures)


def test_writers_and_clearers_at_once_lose_no_picture_and_leave_none(
    client: Any, plane: DataPlane, pictures: str
) -> None:
    blobs = [picture(seed, 32) for seed in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            with connect(plane.handle) as own:
                for step in range(15):
                    rows = [chance.choices(blobs, k=chance.randrange(4)) for _ in range(3)]
                    keys = [f"w{number}.{step}.{i}" for i in range(3)]
                    meta = own.put(pictures, keys, columns(rows))
                    found = own.get_blobs(meta, "images")
                    assert [names_of(found, i) for i in range(3)] == [[blob.name for blob in row] for row in rows]
                    own.clear(pictures, keys)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert bytes_used(client) == 0 and client.rows(f"{pictures}#images").keys.tolist() == []


def test_a_blob_of_other_parts_is_refused(client: Any, pictures: str) -> None:
    other = blob_field("images", [Field("pixels", Kind.RAGGED, torch.uint8, ndim=2)])
    with pytest.raises(ValueError, match=r"field 'images': got the parts \['grid'\] of a blob, expected \['pixels'\]"):
        Blob(other, {"grid": torch.zeros(3)})
    wrong = Blob(other, {"pixels": torch.zeros(2, 2, dtype=torch.uint8)})
    with pytest.raises(
        SchemaMismatch, match=r"row 0: got a blob of other parts than \['pixels', 'grid', 'num_tokens'\]"
    ):
        client.put(pictures, ["b.0"], columns([[wrong]]))
