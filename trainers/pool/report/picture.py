"""Draws what became of the GPUs of a pool: a page with one lane a GPU, coloured by tenant and role.

events of the pool -> pool_trace -> pool_report -> one HTML file that needs no network
"""

from __future__ import annotations

import html
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ...observe.page import card, page, table
from ..state.plan import Role
from .calls import PoolEvent
from .lanes import Lane, PoolTrace, Switch, pool_trace

LANE, GAP, AXIS = 22, 6, 22
"""Height of a lane, space between two lanes, and height of the axis, in pixels."""
MIN_WIDTH, MAX_WIDTH = 966, 16_000
"""Bounds of the width of the lanes in pixels. Wider ones than the page scroll."""
SEGMENT_WIDTH = 9
"""Mean number of pixels that each segment of the fullest lane gets, within these bounds."""
MARK_WIDTH = 1.5
"""Smallest width of a switch's mark in pixels."""
LABEL_WIDTH, SHARE_WIDTH = 58, 128
FIRST_HUE, NEXT_HUE = 216.0, 137.508
"""Hue of the first tenant, and the step to the next one's, in degrees. The golden angle keeps any number of hues
apart."""

ROLES: tuple[Role, ...] = ("train", "rollout")

_STYLE = """<style>
.pool { display: flex; align-items: flex-start; }
.pool > svg { flex: none; }
.pool .scroll { flex: 1 1 auto; overflow-x: auto; min-width: 0; }
.pool svg { width: auto; margin: 0; }
.pool text { font: 12px var(--font); fill: var(--ink); font-variant-numeric: tabular-nums; }
.pool .idle { fill: var(--card); stroke: var(--line); }
.pool .train, .key.train { --c: hsl(var(--hue) 58% 46%); fill: var(--c); }
.pool .rollout, .key.rollout { --c: color-mix(in srgb, hsl(var(--hue) 70% 52%) 42%, var(--card)); fill: var(--c); }
.pool .switch { fill: var(--grey); }
.pool .switch:hover, .pool .train:hover, .pool .rollout:hover { stroke: var(--text); stroke-width: 1; }
.tables td { white-space: nowrap; }
.tables th, .tables td { padding-right: 10px; }
.pool line { stroke: var(--line); }
figure li.switch { --c: var(--grey); }
figure li.idle { --c: var(--card); }
figure li.idle::before { outline: 1px solid var(--line); outline-offset: -1px; }
</style>
"""


def pool_report(events: Iterable[PoolEvent], title: str = "Pool") -> str:
    """Return the HTML page of a pool from its events, in any order. Raises UserError if there are none."""
    trace = pool_trace(events)
    gpus, tenants = len(trace.lanes), len(trace.tenants)
    state = f"{gpus} GPU{'s' * (gpus != 1)}, {tenants} tenant{'s' * (tenants != 1)}, {_time(trace.seconds)}"
    cards = "".join(card(*one) for one in _cards(trace))
    body = (
        f'{_STYLE}<div class="cards">{cards}</div>\n<div class="plots">{_figure(trace)}</div>\n'
        f'<div class="tables">{_waits_table(trace)}{_tenants_table(trace)}{_stages_table(trace)}</div>'
    )
    return page(title, body, state=state, good=True)


# ---------------------------------------------------------------- the lanes


def _figure(trace: PoolTrace) -> str:
    most = max(len(lane.segments) for lane in trace.lanes)
    width = min(MAX_WIDTH, max(MIN_WIDTH, SEGMENT_WIDTH * most))
    height = len(trace.lanes) * (LANE + GAP) + AXIS
    scale = width / max(trace.seconds, 1e-9)
    lanes = "".join(_lane(trace, lane, _top(number), width, scale) for number, lane in enumerate(trace.lanes))
    labels = "".join(
        f'<text x="0" y="{_top(number) + 15}">GPU {lane.gpu}</text>' for number, lane in enumerate(trace.lanes)
    )
    shares = "".join(_share_bar(trace, lane, _top(number)) for number, lane in enumerate(trace.lanes))
    shares += f'<text x="10" y="{height - 5}">held</text>'
    return (
        f'<figure class="wide"><h2>Who had which GPU</h2><ul>{_legend(trace)}</ul><div class="pool">'
        f"{_svg(LABEL_WIDTH, height, labels, 'GPUs')}"
        f'<div class="scroll">{_svg(width, height, _axis(trace, width, height, scale) + lanes, "lanes")}</div>'
        f"{_svg(SHARE_WIDTH, height, shares, 'shares')}</div>"
        "<p>One lane for each GPU; seconds since the pool's start. The pointer on a part of a lane tells what it is. "
        "On the right: the share of the time in which the GPU was held, switches left out.</p></figure>"
    )


def _svg(width: float, height: float, inside: str, label: str) -> str:
    return (
        f'<svg role="img" aria-label="{label}" width="{width:.0f}" height="{height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg">{inside}</svg>'
    )


def _top(number: int) -> int:
    return number * (LANE + GAP)


def _legend(trace: PoolTrace) -> str:
    entries = [
        f'<li class="key {role}" style="{_hue(trace, tenant)}">{html.escape(tenant)}: {role}</li>'
        for tenant in trace.tenants
        for role in ROLES
    ]
    return "".join([*entries, '<li class="switch">switch</li>', '<li class="idle">idle</li>'])


def _hue(trace: PoolTrace, tenant: str) -> str:
    return f"--hue: {(FIRST_HUE + NEXT_HUE * trace.tenants.index(tenant)) % 360:.0f}"


def _lane(trace: PoolTrace, lane: Lane, top: int, width: float, scale: float) -> str:
    parts = [f'<rect class="idle" x="0" y="{top}" width="{width:.0f}" height="{LANE}"/>']
    for one in lane.segments:
        x, wide = (one.begin_s - trace.begin_s) * scale, (one.end_s - one.begin_s) * scale
        told = f"{one.tenant}: {one.role}\n{one.begin_s:.2f} s to {one.end_s:.2f} s ({_time(one.end_s - one.begin_s)})"
        parts.append(
            f'<rect class="{one.role}" style="{_hue(trace, one.tenant)}" x="{x:.2f}" y="{top}" width="{wide:.2f}" '
            f'height="{LANE}"><title>{html.escape(told)}</title></rect>'
        )
    for switch in lane.switches:
        wide = max(MARK_WIDTH, switch.seconds * scale)
        x = (switch.end_s - trace.begin_s) * scale - wide
        parts.append(
            f'<rect class="switch" x="{max(x, 0):.2f}" y="{top}" width="{wide:.2f}" height="{LANE}">'
            f"<title>{html.escape(_told(switch))}</title></rect>"
        )
    return "".join(parts)


def _told(switch: Switch) -> str:
    """Return the text of a switch's tooltip: each stage with its seconds."""
    stages = [f"{stage} {_time(seconds)}" if seconds else stage for stage, seconds in switch.stages]
    return f"{switch.tenant}: {switch.role}, until {switch.end_s:.2f} s\n" + "\n".join(stages)


def _share_bar(trace: PoolTrace, lane: Lane, top: int) -> str:
    share = _held_share(trace, lane)
    return (
        f'<rect class="idle" x="10" y="{top + 7}" width="70" height="8"/>'
        f'<rect class="train" style="--hue: 150" x="10" y="{top + 7}" width="{70 * share:.1f}" height="8"/>'
        f'<text x="88" y="{top + 15}">{share:.0%}</text>'
    )


def _axis(trace: PoolTrace, width: float, height: float, scale: float) -> str:
    """Return lines and numbers at round seconds, about 110 pixels apart."""
    rough = 110 / scale
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    parts, at = [], math.ceil(trace.begin_s / step) * step
    while at <= trace.end_s:
        x = (at - trace.begin_s) * scale
        place = "start" if x < 20 else "end" if x > width - 20 else "middle"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - AXIS}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 5}" text-anchor="{place}">{at:g} s</text>')
        at += step
    return "".join(parts)


# ---------------------------------------------------------------- figures


def _held_share(trace: PoolTrace, lane: Lane) -> float:
    return max(0.0, lane.held_s() - lane.switch_s) / max(trace.seconds, 1e-9)


def _cards(trace: PoolTrace) -> Iterator[tuple[str, str, str]]:
    total = max(trace.seconds, 1e-9) * len(trace.lanes)
    held, switching = (sum(lane.held_s() for lane in trace.lanes), sum(lane.switch_s for lane in trace.lanes))
    shares = [_held_share(trace, lane) for lane in trace.lanes]
    told = f"switches left out; from {min(shares):.0%} to {max(shares):.0%}"
    yield "GPUs held", f"{sum(shares) / len(shares):.1%}", told
    yield "Idle", f"{1 - held / total:.1%}", "nobody held the GPU"
    yield "Switching", f"{switching / total:.1%}", f"{sum(len(lane.switches) for lane in trace.lanes)} switches"
    waits = [wait for (_, role), found in trace.waits_s.items() if role == "train" for wait in found]
    if waits:
        yield "Longest wait to train", _time(max(waits)), f"median {_time(statistics.median(waits))}"


def _tenants_table(trace: PoolTrace) -> str:
    held = {
        tenant: [sum(lane.held_s(tenant, role) for lane in trace.lanes) for role in ROLES] for tenant in trace.tenants
    }
    total = max(sum(map(sum, held.values())), 1e-9)
    lines = [
        _line(tenant, f"{train:.0f}", f"{rollout:.0f}", f"{(train + rollout) / total:.0%}")
        for tenant, (train, rollout) in held.items()
    ]
    return table("GPU seconds held", ("tenant", "train", "rollout", "share"), lines)


def _waits_table(trace: PoolTrace) -> str:
    lines = [
        _line(tenant, role, str(len(found)), *(_time(float(np.quantile(found, share))) for share in (0.5, 0.95, 1)))
        for (tenant, role), found in sorted(trace.waits_s.items())
    ]
    return table("Waits for GPUs", ("tenant", "role", "grants", "median", "p95", "longest"), lines)


def _stages_table(trace: PoolTrace) -> str:
    seconds: dict[str, list[float]] = defaultdict(list)
    for lane in trace.lanes:
        for switch in lane.switches:
            for stage, took_s in switch.stages:
                seconds[stage].append(took_s)
    lines = [
        _line(stage, str(len(found)), _time(statistics.median(found)), _time(max(found)))
        for stage, found in seconds.items()
    ]
    return table("Stages of switches", ("stage", "GPUs", "median", "longest"), lines)


def _line(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _time(seconds: float) -> str:
    """Return seconds with a unit and the digits that matter."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if 1 <= seconds < 100 else f"{seconds:.0f} s"
