"""The ipc transport: what is sent arrives bit for bit or raises; two versions stay; nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from headrace.actors.engines.hf import HfEngine
from headrace.actors.transports.factory import build_receiver, build_sender
from headrace.actors.transports.ipc import IpcReceiver, IpcSender
from headrace.actors.transports.protocol import WeightManifest, WeightTransferError


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 8, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "strided": torch.randn(6, 10, generator=generator, requires_grad=True).t(),
        "empty": torch.zeros(0, 4),
        "count": torch.arange(7),
    }


def assert_equal(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor.detach()), name


@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
def test_arrives_whole_and_the_last_two_versions_stay(tmp_path: Path, bucket_bytes: int) -> None:
    sender, receiver = IpcSender("run", bucket_bytes=bucket_bytes, root=tmp_path), IpcReceiver()
    manifests = [sender.send(version, weights(version)) for version in (1, 2, 5)]
    for manifest in manifests[1:]:
        assert_equal(receiver.receive(manifest), weights(manifest.version))
    with pytest.raises(WeightTransferError, match="version 1 is not at .*manifest-1 .any more."):
        receiver.receive(manifests[0])
    with pytest.raises(ValueError, match="got version 5, expected one above the last, 5"):
        sender.send(5, weights(5))
    assert len(repr(manifests[0])) < 400
    sender.close()
    sender.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightTransferError, match="the sender has ended"):
        receiver.receive(manifests[2])


def test_tensors_received_are_no_views_of_shared_memory(tmp_path: Path) -> None:
    sender = IpcSender("run", root=tmp_path)
    named = IpcReceiver().receive(sender.send(1, weights(1)))
    sender.send(2, weights(2))
    sender.send(3, weights(3))
    assert_equal(named, weights(1))
    sender.close()


def test_damage_is_named(tmp_path: Path) -> None:
    sender, receiver = IpcSender("run", bucket_bytes=256, root=tmp_path), IpcReceiver()
    manifest = sender.send(1, weights(1))
    folder = Path(manifest.location).parent
    buffer = folder / "buckets-0"
    whole = bytearray(buffer.read_bytes())
    whole[256 + 3] ^= 1
    buffer.write_bytes(whole)
    with pytest.raises(WeightTransferError, match=r"version 1 in .*buckets-0: bucket 1: xxh3"):
        receiver.receive(manifest)
    os.truncate(buffer, 100)
    with pytest.raises(WeightTransferError, match=r"version 1 in .*buckets-0: bucket 0: got a buffer"):
        receiver.receive(manifest)
    buffer.unlink()
    with pytest.raises(WeightTransferError, match="version 1: .*buckets-0 cannot be mapped"):
        receiver.receive(manifest)
    (folder / "manifest-1").write_bytes(b"noise")
    with pytest.raises(WeightTransferError, match="is no manifest"):
        receiver.receive(manifest)
    manifest = sender.send(2, weights(2))
    with pytest.raises(WeightTransferError, match="holds version 2, expected 3"):
        receiver.receive(WeightManifest(3, "ipc", manifest.location, 0))
    sender.close()


def test_a_version_overwritten_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.actors.transports import ipc

    sender = IpcSender("run", root=tmp_path)
    manifest = sender.send(1, weights(1))
    original = ipc.read_bucket

    def slow(*args, **kwargs) -> None:  # noqa: ANN002, ANN003
        original(*args, **kwargs)
        sender.send(2, weights(2))
        sender.send(3, weights(3))

    monkeypatch.setattr(ipc, "read_bucket", slow)
    with pytest.raises(WeightTransferError, match="two versions ahead"):
        IpcReceiver().receive(manifest)
    sender.close()


def test_a_failed_send_leaves_the_published_versions(tmp_path: Path) -> None:
    sender, receiver = IpcSender("run", root=tmp_path), IpcReceiver()
    manifest = sender.send(1, weights(1))
    with pytest.raises(ValueError, match="complex64"):
        sender.send(2, {"w": torch.zeros(3, dtype=torch.complex64)})
    assert_equal(receiver.receive(manifest), weights(1))
    sender.close()


def _send_and_hang(root: str, ready) -> None:  # noqa: ANN001
    IpcSender("run", root=Path(root)).send(1, weights(1))
    ready.set()
    signal.pause()


def test_a_dead_sender_s_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_send_and_hang, args=(str(tmp_path), ready))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(ValueError, match="a living run has the folder"):
            IpcSender("run", root=tmp_path)
    finally:
        process.kill()
        process.join()
    process.close()
    IpcSender("run", root=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_into_an_engine(tmp_path: Path, model_folder: str) -> None:
    import asyncio

    engine = HfEngine(model_folder)
    sender = IpcSender("run", root=tmp_path)
    named = {name: p.detach() * 1.5 for name, p in engine._model.named_parameters()}
    asyncio.run(engine.load_weights(1, IpcReceiver().receive(sender.send(1, named))))
    assert all(torch.equal(p, named[name]) for name, p in engine._model.named_parameters())
    sender.close()


def test_factory() -> None:
    assert isinstance(build_receiver("ipc"), IpcReceiver)
    for build in (lambda: build_receiver("nccl"), lambda: build_sender("nccl", "run", 64)):
        with pytest.raises(ValueError, match="sync.transport: got 'nccl', expected one of ipc"):
            build()
