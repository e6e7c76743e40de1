"""Translates a layout of `headrace bench gpu`, such as `colocated-2`, into the keys of a run's configuration.

    colocated    every GPU has an engine and a train rank
    separate     the first half of the GPUs has the train ranks, the other half the engines
    tensor       one engine and one replica, both split over every GPU (tensor parallel)
    one-engine   a train rank on every GPU, one engine on the first

A layout is written NAME or NAME-N with N GPUs, which are all GPUs if N is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...trainers.errors import UserError

NAMES = ("colocated", "separate", "tensor", "one-engine")
CPU = "cpu"
"""Name of the only layout of a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the engines and the train ranks of a run."""

    label: str
    """Name of the layout as the user wrote it, which is part of the summary's keys."""
    name: str
    """One of NAMES, or CPU."""
    gpus: int
    """Number of GPUs that the run uses; 0 on a machine without one."""

    @property
    def shared(self) -> bool:
        """True if engines and train ranks share GPUs."""
        return self.name != "separate"

    def overrides(self) -> list[str]:
        """Return the keys of the run's configuration, as `key=value`."""
        if self.name == CPU:
            return []
        if self.name == "one-engine":
            everywhere = ",".join(map(str, range(self.gpus)))
            placed = [f"resources.trainer_gpus=[{everywhere}]", "resources.rollout_gpus=[0]"]
        else:
            placed = [f"resources.layout={'colocated' if self.shared else 'separate'}"]
        return [*placed, *(f"{key}={value}" for key, value in self._sizes().items())]

    def _sizes(self) -> dict[str, int]:
        if self.name == "tensor":
            return {"rollout.tp": self.gpus, "trainer.tp": self.gpus}
        if self.name == "one-engine":
            return {"trainer.dp": self.gpus}
        ranks = self.gpus if self.shared else self.gpus // 2
        return {"rollout.num_engines": ranks, "trainer.dp": ranks}


def parse_layout(text: str, gpus: int) -> Layout:
    """Return the layout that `text` names on a machine with `gpus` GPUs. Raises UserError for an unknown name, and for
    a number of GPUs that the machine has not or that the layout cannot use."""
    if gpus == 0:
        raise UserError(f"--layout: got {text!r} on a machine without a GPU, expected no layout")
    name, dash, number = text.rpartition("-")
    if not (dash and number.isdecimal()):
        name, number = text, str(gpus)
    if name not in NAMES:
        raise UserError(
            f"--layout: got {text!r}, expected some of {', '.join(NAMES)}, each alone or with -N for N GPUs"
        )
    used = int(number)
    if not 1 <= used <= gpus:
        raise UserError(f"--layout: got {text!r}, expected 1 to {gpus} GPUs, the number of this machine's")
    if name == "separate" and (used < 2 or used % 2):
        raise UserError(f"--layout: got {text!r} with {used} GPUs, expected an even number for `separate`")
    return Layout(text, name, used)
