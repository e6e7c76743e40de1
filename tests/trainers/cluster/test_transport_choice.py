"""Which weight transport a run uses, and how large its buckets are."""

from __future__ import annotations

import pytest

from headrace.actors.weight_sync.config import SyncConfig
from headrace.trainers.cluster.transport_choice import bucket_mib, resolve_kind


def test_auto() -> None:
    assert resolve_kind("auto", one_host=True) == "ipc"
    assert resolve_kind("auto", one_host=False) == "collective"
    assert resolve_kind("auto", one_host=False, encrypted=True) == "store"
    assert resolve_kind("collective", one_host=False, encrypted=True) == "collective", "the user has chosen it"
    assert resolve_kind("disk", one_host=True) == "disk"
    with pytest.raises(ValueError, match="sync.transport: got 'nccl', expected one of auto, collective"):
        resolve_kind("nccl", one_host=True)


def test_buckets_are_larger_between_gpus() -> None:
    unset, given = SyncConfig(), SyncConfig(bucket_mib=8)
    for kind in ("ipc", "collective", "store", "disk"):
        assert bucket_mib(unset, kind, "cpu", pooled=False) == 64
        assert bucket_mib(unset, kind, "cuda:1", pooled=False) == (512 if kind in ("ipc", "collective") else 64)
        assert bucket_mib(given, kind, "cuda", pooled=False) == 8
