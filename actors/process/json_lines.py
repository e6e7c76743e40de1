"""Appends JSON lines to a file and reads them back; a line torn by a kill or a full disk harms no other line.

encoded, append   write all lines or none, after the half line of a killed writer is cut off
read_lines        reads a whole file; lines that are not JSON objects are skipped, and their count is logged
LineTail          reads what other processes have appended since the last call
replace_file      gives a small file another content, whole or not at all
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


def encoded(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Return each of `lines` as a JSON object in one line. Raises ValueError for NaN and infinity, which JSON does not
    have."""
    texts = (json.dumps(line, ensure_ascii=False, allow_nan=False) for line in lines)
    return b"".join(text.encode("utf-8", "replace") + b"\n" for text in texts)


def append(path: str | os.PathLike[str], data: bytes) -> None:
    """Append whole lines to the file at `path`, all of them or none. There must be one writer at a time.

    The file is created if necessary. An incomplete last line, which a killed writer can have left, is cut off first.
    Raises an OSError that names the file when it cannot be written; it then has no part of `data`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            end = _end_of_whole_lines(descriptor)
            if end < os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, end)
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except BaseException:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"{os.fspath(path)} cannot be written: {error.strerror}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file with `data` atomically. If this process is killed meanwhile, or the disk is full
    (OSError), the file keeps its earlier content."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(data)
    draft.replace(path)


def _end_of_whole_lines(descriptor: int) -> int:
    """Return the position after the last newline of an open file, 0 if it has none."""
    at, length = os.fstat(descriptor).st_size, 1
    while at:
        begin = max(0, at - length)
        found = os.pread(descriptor, at - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at, length = begin, _CHUNK
    return 0


def read_lines(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return the JSON objects of a file, each with the number of its line from 1. Raises OSError if the file cannot be
    read.

    An incomplete last line, which may still be being written, is left out. Other lines that are not JSON objects are
    left out too; a warning gives their count.
    """
    return parse_lines(path, Path(path).read_bytes().split(b"\n")[:-1])


def parse_lines(path: str | os.PathLike[str], lines: Iterable[bytes]) -> list[tuple[int, dict[str, Any]]]:
    """Return the JSON objects among `lines` of the file at `path`, each with its number from 1. Others are counted in a
    warning."""
    found, torn = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append((number, value))
        else:
            torn += 1
    if torn:
        _log.warning("%s: %d torn line(s) left out, of %d", os.fspath(path), torn, torn + len(found))
    return found


class LineTail:
    """Reads the JSON objects that other processes append to a file, each object once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Begin at the current end of the file."""
        self._path = path
        self._file_id: int | None = None
        self._at = 0
        self.read(skip=True)

    def read(self, *, skip: bool = False) -> list[dict[str, Any]]:
        """Return the objects that were appended since the last call; with `skip`, pass over them and return [].

        An incomplete last line is left for the next call, and torn lines are left out and counted in a warning. If the
        file was replaced or has become shorter, reading continues at its end. A file that cannot be read has nothing
        new.
        """
        try:
            with open(self._path, "rb") as file:
                state = os.fstat(file.fileno())
                known, self._file_id = self._file_id, state.st_ino
                if skip or (known is not None and known != state.st_ino) or state.st_size < self._at:
                    self._at = _end_of_whole_lines(file.fileno())
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [] if skip else [line for _, line in parse_lines(self._path, whole.split(b"\n")[:-1])]
