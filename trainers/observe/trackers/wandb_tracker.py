"""Sends metrics and samples to Weights & Biases, or writes them to the run folder for `wandb sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ....dataplane.imports import MissingExtra
from ...config.trackers import WandbOptions
from .protocol import SAMPLE_COLUMNS, SampleRow, TrackedRun


class WandbTracker:
    """Tracker that is a run of Weights & Biases. Steps that were logged before, as a resumed run repeats them, are
    dropped by the service."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._run: Any = None
        self._library: Any = None

    def start(self, run: TrackedRun) -> str:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - the extra `trackers`
            from wandb.sdk.lib.import_hooks import (  # pyright: ignore[reportMissingImports]
                unregister_all_post_import_hooks,
            )
        except ModuleNotFoundError:
            raise MissingExtra("wandb", "the tracker wandb", "trackers") from None
        self._library = wandb
        options, name = self._options, run.previous or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            mode=options.mode,
            group=options.group,
            tags=list(options.tags) or None,
            config=dict(run.config),
            reinit="create_new",
            # It must neither capture what the run prints nor measure the machine.
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        # wandb 0.31 counts the packages that a run uses by hooks on their imports. Once its helper process has died,
        # these hooks raise, and with them every later import of such a package (torch, tensorboard) in this process.
        unregister_all_post_import_hooks()
        return name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self) -> None:
        self._run.finish()
