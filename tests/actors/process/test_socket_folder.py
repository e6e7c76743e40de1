"""Tests that sockets get a folder in which their paths are short enough."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from headrace.actors.process import socket_folder
from headrace.actors.process.socket_folder import BELOW_RAY, LONGEST, ray_folder, short_folder, vllm_folder


def test_a_folder_is_replaced_exactly_when_a_path_in_it_would_be_too_long(tmp_path: Path) -> None:
    longest = "/" + "d" * (LONGEST - BELOW_RAY - 1)
    assert short_folder(longest, "TMPDIR", BELOW_RAY) is None
    assert short_folder(longest + "d", "TMPDIR", BELOW_RAY, (str(tmp_path / "none"), str(tmp_path))) == str(tmp_path)
    assert short_folder("/" + "ä" * 20, "TMPDIR", BELOW_RAY) is not None, "bytes count, and not characters"


def test_without_a_short_folder_the_sentence_names_variable_and_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^TMPDIR: got '/d+' of 100 bytes, expected at most 39, because") as refusal:
        short_folder("/" + "d" * 99, "TMPDIR", BELOW_RAY, (str(tmp_path / "none"),))
    assert "\n" not in str(refusal.value)


def test_ray_and_vllm_leave_a_deep_folder_of_a_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert ray_folder() is None
    deep = "/scratch/partition-cpu/user-0123456789/job-1234567/" + "d" * 50
    monkeypatch.setenv("TMPDIR", deep)
    monkeypatch.setattr(tempfile, "tempdir", deep)
    assert ray_folder() == "/tmp/ray" and vllm_folder() == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    assert ray_folder() is None, "Ray's own variable goes first"
    monkeypatch.setattr(socket_folder.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="^TMPDIR: got '/scratch"):
        vllm_folder()
