"""Builds the HTML pages of a report and of a comparison: their frame, style, cards, plots and tables.

A page is one file that works offline. All text in it is escaped, because prompts and answers may contain HTML.
"""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plots import Plot

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title - headrace</title>
<style>
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --page: #f5f6f8; --card: #ffffff; --line: #e1e4e9; --text: #1b1f27; --ink: #5d6675; --grid: #e3e6eb;
  --blue: #2e6bd6; --orange: #d97a0b; --green: #2a9162; --red: #cc3f4d; --purple: #8452c8; --grey: #a3abb8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b1f28; --line: #2c323e; --text: #e8ebf0; --ink: #9aa4b4; --grid: #2c323e;
    --blue: #74a5ff; --orange: #f2a04a; --green: #56c596; --red: #f27d88; --purple: #b48cf2; --grey: #6d7687;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 var(--font); }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; margin-bottom: 20px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 6px; }
header span { color: var(--ink); }
header .state { font-size: 13px; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--green) !important; }
.open { color: var(--orange) !important; }
.cards { display: grid; gap: 14px; margin-bottom: 14px;
  grid-template-columns: repeat(auto-fill, minmax(max(160px, calc((100% - 42px) / 4)), 1fr)); }
.card, figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 16px; display: flex; flex-direction: column; }
.card span { color: var(--ink); font-size: 13px; }
.card b { font-size: 24px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.card small { color: var(--ink); font-size: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 16px 18px 12px; min-width: 0; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px; padding: 0; }
figure li { color: var(--ink); font-size: 13px; }
figure li::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; background: var(--c); }
figure svg { display: block; width: 100%; height: auto; margin-top: auto; }
figure p { color: var(--ink); font-size: 12px; margin: 4px 0 0; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px;
  margin-top: 14px; align-items: start; }
.tables.first { margin: 0 0 14px; }
.tables.first section { max-height: none; }
section { padding: 16px 18px; overflow-x: auto; max-height: 460px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--ink); font-weight: 500; white-space: nowrap; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--ink); font-size: 13px; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; margin-bottom: 10px; }
.bar input, .bar select, button { font: inherit; font-size: 13px; color: var(--text); background: var(--page);
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 8px; }
.bar input[type=search] { flex: 1 1 220px; } .bar input[type=number] { width: 76px; }
button { cursor: pointer; }
.samples { margin-top: 14px; max-height: none; }
.sample { border-top: 1px solid var(--line); padding: 12px 0 8px; }
.sample .facts { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: center; font-size: 13px;
  color: var(--ink); }
.sample .facts b { color: var(--text); font-weight: 600; }
.sample .bad { color: var(--red); }
.turn { display: grid; grid-template-columns: 92px minmax(0, 1fr); gap: 0 10px; margin-top: 6px; }
.turn > span { color: var(--ink); font-size: 12px; padding-top: 2px; }
.turn > div { font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 22em; overflow-y: auto; }
.turn.environment > div { border-left: 3px solid var(--purple); padding-left: 8px; color: var(--ink); }
.turn.prompt > div { color: var(--ink); }
.turn mark { color: inherit; background: color-mix(in srgb, var(--red) calc(var(--d) * 1%), transparent);
  border-radius: 2px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  overflow-x: auto; }
</style>
</head>
<body>
<main>
<header><h1>$title</h1>$state</header>
$body
</main>$scripts
</body>
</html>
"""
"""Page as a string.Template, with a light and a dark theme."""


def page(title: str, body: str, *, state: str = "", good: bool = False, scripts: str = "") -> str:
    """Return a whole page. title: heading, as text. body: HTML below the heading. state: text beside the heading, ""
    for none; the text is green if `good`. scripts: HTML of the `<script>` elements at the end."""
    mark = f'<span class="state {"good" if good else "open"}">{html.escape(state)}</span>' if state else ""
    return Template(_PAGE).substitute(title=html.escape(title), state=mark, body=body, scripts=scripts)


def write_page(path: Path, text: str) -> Path:
    """Replace the page at `path` atomically and return the path. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return path


def script(name: str) -> str:
    """Return the `<script>` element with the JavaScript file `name` of this folder."""
    return f"<script>\n{Path(__file__).with_name(name).read_text(encoding='utf-8')}</script>"


def data_script(identity: str, value: Any) -> str:
    """Return a `<script>` element that holds `value` as JSON, for a script of the page. No text in `value` can end the
    element, because `<` is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{identity}">{text}</script>'


def card(label: str, value: str, small: str) -> str:
    return (
        f'<div class="card"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(small)}</small></div>"
    )


def plot_html(plot: Plot) -> str:
    legend = "".join(f'<li style="--c: var(--{colour})">{html.escape(label)}</li>' for label, colour in plot.legend)
    note = f"<p>{html.escape(plot.note)}</p>" if plot.note else ""
    width = ' class="wide"' if plot.wide else ""
    listed = f"<ul>{legend}</ul>" if legend else ""
    return f"<figure{width}><h2>{html.escape(plot.title)}</h2>{listed}{plot.svg}{note}</figure>"


def table(title: str, head: Sequence[str], lines: Sequence[str]) -> str:
    """Return an HTML table with a title, or "" if it has no lines."""
    if not lines:
        return ""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = f"<thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"<section><h2>{title}</h2><table>{body}</table></section>"


def short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
