"""Serves the page of a run on this machine, and keeps it up to date while the run goes on.

    the page -> GET /data?mark=M, every few seconds -> lines that the run has added since M -> new points of the curves

The server only reads the run folder, so that the run neither waits for it nor needs to know of it. It listens on the
loopback address. A request must name that address as its host, because a page of another site could otherwise read the
answers through a name of its own that it points here (DNS rebinding).
"""

from __future__ import annotations

import bisect
import itertools
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ....actors.process.json_lines import parse_lines
from ...errors import UserError
from ..metrics import RESUMED, RunRecords
from ..samples import FILE, read_samples
from .page import page, policy
from .report import report_data, report_state

HOST = "127.0.0.1"
_HOSTS = (HOST, "localhost")


class RunReader:
    """Reads what a run has added to its folder since the last call. Thread-safe, because every request has a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._begin(-1)

    def _begin(self, file_id: int) -> None:
        """Forget everything, before the first line of a file is read."""
        self._file_id = file_id
        self._born = time.time_ns()
        self._run = RunRecords()
        self._ends, self._steps = list[int](), list[int]()
        """For each line with metrics, its end in the file and its step."""
        self._at = self._whole_at = 0
        """Position after the last line read, and after the last line that dropped records."""

    def data(self, mark: str = "") -> dict[str, Any]:
        """Return the run's page as `report_data` does. The entry `mark` names the state of the file. With an earlier
        mark, the curves have only the steps that were added since; `whole` says whether they have all steps. With the
        present mark, there is only the run's state. Raises UserError for a broken file."""
        with self._lock:
            self._read()
            born, _, at = mark.partition(".")
            known = int(at) if born == str(self._born) and at.isdecimal() else -1
            whole = not self._whole_at <= known <= self._at
            only = None if whole else set(self._steps[bisect.bisect_right(self._ends, known) :])
            if known == self._at:
                data = {"state": report_state(self._folder, self._run.records, self._run.events), "columns": {}}
            else:
                data = report_data(self._folder, self._run.records, self._run.events, only)
            samples = self._folder / FILE
            return data | {
                "live": True,
                "whole": whole,
                "mark": f"{self._born}.{self._at}",
                "samples_bytes": samples.stat().st_size if samples.is_file() else 0,
            }

    def _read(self) -> None:
        path = self._folder / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                status = path.stat()
                if status.st_ino != self._file_id or status.st_size < self._at:
                    self._begin(status.st_ino)
                file.seek(self._at)
                lines = file.read().split(b"\n")[:-1]  # An incomplete last line is read the next time.
        except OSError:
            return
        ends = list(itertools.accumulate((len(line) + 1 for line in lines), initial=self._at))
        for number, line in parse_lines(path, lines):
            if not self._run.add(line):
                self._begin(-1)  # The next call reads the file again, instead of adding its lines twice.
                raise UserError(f"{path}: a line is not a metrics record, expected a whole number as `step`")
            if line.get("event") == RESUMED:
                self._whole_at = ends[number]
            elif "event" not in line:
                self._ends.append(ends[number])
                self._steps.append(line["step"])
        self._at = ends[-1]


class WatchServer(ThreadingHTTPServer):
    """HTTP server of one run's page. It reads the run folder at every request."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        """folder: the run folder. port: port on the loopback address; 0 picks a free one. Raises UserError if `folder`
        holds no run, or if the port is not free."""
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
            what = "the folder holds no run" if folder.is_dir() else "there is no such folder"
            raise UserError(f"RUN: got {folder}, but {what}; expected a run folder, which a run makes when it starts")
        self.name = folder.resolve().name
        self.folder = folder
        self.reader = RunReader(folder)
        self.reader.data()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port: got {port}, expected a port that is free on {HOST} ({error})") from error

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that has gone, and report any other error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def answer(self, path: str, mark: str) -> tuple[str, str] | None:
        """Return (media type, text) of the answer to a request, None for a path that the page does not need. mark: see
        `RunReader.data`."""
        if path == "/":
            return "text/html", page(self.name, self.reader.data(), read_samples(self.folder / FILE))
        if path == "/data":
            return "application/json", json.dumps(self.reader.data(mark))
        if path == "/samples":
            return "application/json", json.dumps(read_samples(self.folder / FILE))
        return None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests that name this machine as their host."""

    timeout = 30.0

    def do_GET(self) -> None:
        # The port may differ, as behind `ssh -L`.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self._send(403, "text/plain", f"expected a request to {HOST} or localhost")
            return
        path, _, mark = self.path.partition("?mark=")
        try:
            assert isinstance(self.server, WatchServer)
            found = self.server.answer(path, mark)
        except (UserError, OSError) as error:
            self._send(500, "text/plain", str(error))
            return
        self._send(200, *found) if found else self._send(404, "text/plain", "no such page")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing about requests."""
