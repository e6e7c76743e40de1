"""Builds the frame of a page that shows runs: one file with style, scripts and data, which works offline.

A page's scripts draw it from its data, which is JSON. They set every text with textContent, because prompts, answers
and names may contain HTML, and the page's security policy allows no other script and no other address.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

_FOLDER = Path(__file__).parent
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js", "samples.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$title - headrace</title>
<style>
$style
</style>
</head>
<body>
<main>
<header><h1>$title</h1></header>
<noscript>This page draws its figures with scripts, which this program does not run.</noscript>
</main>
$data
$scripts
</body>
</html>
"""
"""Page as a string.Template."""


def page(title: str, data: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> str:
    """Return a whole page. title: heading, as text. data: everything that `page.js` draws. samples: episodes as
    `read_samples` returns them."""
    scripts = [_file(name) for name in _SCRIPTS]
    return Template(_PAGE).substitute(
        title=html.escape(title),
        policy=policy(),
        style="\n".join(_file(name) for name in _STYLES),
        data=_data_script("page-data", data) + _data_script("samples-data", list(samples)),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


@cache
def policy() -> str:
    """Return the Content-Security-Policy of every page. Only the page's own scripts run, and they reach only the server
    that the page came from."""
    digests = (hashlib.sha256(_file(name).encode()).digest() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; script-src {scripts}"


@cache
def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _data_script(identity: str, value: Any) -> str:
    """Return a `<script>` element that holds `value` as JSON, for a script of the page. No text in `value` can end the
    element, because `<` is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{identity}">{text}</script>'


def write_page(path: Path, text: str) -> Path:
    """Replace the page at `path` atomically and return the path. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        # Halves of surrogate pairs, which texts of users can have, are not UTF-8.
        new.write_text(text, encoding="utf-8", errors="replace")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return path


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return a table for a page's data, in a list; an empty list if the table has no rows."""
    return [{"title": title, "head": list(head), "rows": [list(row) for row in rows]}] if rows else []


def short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
