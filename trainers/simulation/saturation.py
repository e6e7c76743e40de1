"""Computes how much of its capacity each part of the data plane uses, to say which part saturates first.

Each share is the part's work in a step, by a closed formula, divided by the simulated seconds of the step. The work of
the directory is simulated, because rollout actors put more groups together when it is slow; its formula is a bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Column, Table

from ..config.staleness import Mode
from .scenario import MODES, Scenario

PARTS: Mapping[str, str] = {
    "directory": "directory",
    "unit": "storage unit",
    "link": "link",
    "driver": "driver",
    "weights": "weight sync",
}
"""Parts of which one saturates first: name in the summary -> name in the table."""


def part_seconds(scenario: Scenario, mode: Mode) -> dict[str, float]:
    """Return the seconds for which each part works in a step of `mode`: name of the part -> seconds.

    Those of the directory, divided by its shards, are the most that it can take: no groups wait for a slow put, to be
    put together. Unit and link are those of the busiest host. The trainer waits for the driver and the weight sync.
    """
    cluster, rows = scenario.cluster, scenario.prompts_per_step * scenario.group_size
    chunks = scenario.chunks(mode)
    puts_s = scenario.prompts_per_step * scenario.directory_groups_s()
    read_bytes = rows * (scenario.response_tokens + scenario.prompt_tokens) * scenario.got_bytes
    return {
        "directory": (puts_s + chunks * scenario.directory_claim_s) / scenario.directory_shards,
        "unit": cluster.unit_s(read_bytes),
        "link": cluster.rows_link_s(read_bytes) + cluster.weights_link_s(),
        "driver": chunks * scenario.plan_s + scenario.controller_s,
        "weights": scenario.sync_s,
    }


def saturation(name: str, scenario: Scenario, mode: Mode, step_s: float, directory_s: float) -> dict[str, float]:
    """Return the part of the summary about a run in one mode, whose steps take `step_s` seconds.

    The keys are `{name}.{mode}.{part}_share`, for each of `PARTS`, and `{name}.{mode}.rows_per_s`. directory_s:
    simulated seconds of the directory's work in a step.
    """
    seconds = part_seconds(scenario, mode) | {"directory": directory_s / scenario.directory_shards}
    rows = scenario.prompts_per_step * scenario.group_size
    summary = {f"{name}.{mode}.{part}_share": worked_s / step_s for part, worked_s in seconds.items()}
    return summary | {f"{name}.{mode}.rows_per_s": rows / step_s}


def saturation_table(summary: Mapping[str, float]) -> Table:
    """Format shares as a table with one line for each number of GPUs, in the mode whose steps are shortest there."""
    header = ("s per step", "rows/s", "weight sync s", "directory", "unit", "link", "driver", "weights")
    columns = ("run", "mode", *(Column(name, justify="right") for name in header), "most used")
    table = Table(*columns, title="shares of capacity in the fastest mode", title_justify="left", title_style="bold")
    for name in dict.fromkeys(key.rsplit(".", 2)[0] for key in summary if key.endswith(".directory_share")):
        modes = [mode for mode in MODES if f"{name}.{mode}.seconds" in summary]
        mode = min(modes, key=lambda mode: summary[f"{name}.{mode}.seconds"])
        shares = {part: summary[f"{name}.{mode}.{part}_share"] for part in PARTS}
        seconds = summary[f"{name}.{mode}.seconds"]
        table.add_row(
            name.partition(".")[2] or "as configured",
            mode,
            f"{seconds:.3f}",
            f"{summary[f'{name}.{mode}.rows_per_s']:.0f}",
            f"{shares['weights'] * seconds:.3f}",
            *(f"{share:.1%}" for share in shares.values()),
            PARTS[max(shares, key=lambda part: shares[part])],
        )
    return table
