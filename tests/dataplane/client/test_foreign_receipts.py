"""A receipt of another run, or of another data plane in this process, is refused by name: it never reads other rows."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.block_io import read_rows
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import ForeignReceipt, IntegrityError
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.dataplane.rows import fresh_run_id

SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("r", Kind.PER_SAMPLE, torch.float32)])


def open_with_rows(
    kind: str, integrity: str, run_id: str, value: int
) -> tuple[DataPlane, DataPlaneClient, KVBatchMeta]:
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 4})
    config = DataPlaneConfig.model_validate({"store": store, "integrity": integrity})
    plane = open_data_plane(config, run_id=run_id, in_process=True)
    client = connect(plane.handle)
    client.register("t", SCHEMA, ["train"])
    columns = {"ids": [torch.full((3,), value, dtype=torch.int32)] * 2, "r": torch.full((2,), float(value))}
    client.put("t", [f"{value}.0", f"{value}.1"], columns)
    return plane, client, client.claim("t", "train", ["ids", "r"], 2)


@pytest.mark.parametrize("same_run_id", [True, False])
@pytest.mark.parametrize("integrity", ["off", "verify"])
@pytest.mark.parametrize("kind", ["local", "shm"])
def test_a_receipt_of_an_earlier_data_plane_is_refused(kind: str, integrity: str, same_run_id: bool) -> None:
    first_id = fresh_run_id()
    plane, client, old = open_with_rows(kind, integrity, first_id, 1)
    travelled = [KVBatchMeta.from_bytes(old.to_bytes()), pickle.loads(pickle.dumps(old)), old.select([1, 0])]
    plane.close()
    plane, client, new = open_with_rows(kind, integrity, first_id if same_run_id else fresh_run_id(), 2)
    with plane:
        for receipt in travelled:
            with pytest.raises(ForeignReceipt, match=r"op=get partition='t' keys=\['1\.") as caught:
                client.get(receipt)
            assert plane.handle.run_id in str(caught.value)
            for outcome in ("done", "retry"):
                with pytest.raises(ForeignReceipt, match="op=release"):
                    client.release(receipt, "train", outcome)
        assert client.status().leased_rows == 2, "the old receipt's lease has the number of the new one's"
        assert client.get(new).tensor("r").tolist() == [2.0, 2.0]
        client.release(new, "train", "done")


def test_checksums_know_the_data_plane() -> None:
    """Bytes that another data plane wrote do not pass, should a store ever hand them out."""
    with open_with_rows("shm", "verify", fresh_run_id(), 1)[0] as plane, connect(plane.handle) as client:
        meta = client.lookup("t", ["1.0", "1.1"])
        forged = replace(meta, plane_id=meta.plane_id ^ 1)
        store = client._operations.store
        assert read_rows(store, meta, ("ids", "r"), check=True, timeout_s=5.0).num_rows == 2
        with pytest.raises(IntegrityError, match="xxh3"):
            read_rows(store, forged, ("ids", "r"), check=True, timeout_s=5.0)
