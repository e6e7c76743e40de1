"""Writes metrics and samples as TensorBoard events to `tensorboard/` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....dataplane.imports import MissingExtra
from ...config.trackers import TensorboardOptions
from .protocol import SAMPLE_COLUMNS, SampleRow, TrackedRun


class TensorboardTracker:
    """Tracker that is a folder of TensorBoard events. Samples are a text, because TensorBoard has no tables."""

    def __init__(self, options: TensorboardOptions) -> None:
        self._options = options
        self._writer: Any = None
        self._summary: Any = None  # the class of tensorboard's message

    def start(self, run: TrackedRun) -> str:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise MissingExtra("tensorboard", "logging.tensorboard=true", "report") from None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=max(1, round(self._options.flush_s)))
        self._summary = Summary
        return ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # A step is one event: an event for each of its hundred scalars (`add_scalar`) takes the driver 7 ms.
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *rows]
        cells = ([str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def finish(self) -> None:
        self._writer.close()
