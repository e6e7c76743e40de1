"""Writes the generated parts of the documentation: the modules, the config reference, names of peers, and llms.txt.

    python tools/docs_sources.py

Run it after adding or removing a module, a config key or a page, or changing a first sentence. A test compares the
files.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("codecs", "dataplane", "actors", "trainers", "bench", "cli", "testing")
KEYS_BEGIN, KEYS_END = "<!-- keys: made by tools/docs_sources.py -->\n", "<!-- end of the keys -->\n"
FITS_BEGIN, FITS_END = "<!-- what fits: made by tools/docs_sources.py -->\n", "<!-- end of what fits -->\n"
TABLES_BEGIN, TABLES_END = "<!-- tables: made by tools/docs_sources.py -->\n", "<!-- end of the tables -->\n"


def main() -> int:
    """Write every generated file; returns the exit code."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
    return 0


def generated() -> dict[Path, str]:
    """Return the text that each generated file should have: path -> text."""
    from config_reference import peers_markdown
    from what_fits import what_fits_markdown

    memory = DOCS / "training" / "memory.md"
    peers = DOCS / "start" / "coming-from.md"
    sharing = DOCS / "scale" / "simulate-a-pool.md"
    pages = {
        DOCS / "internals" / "modules.md": modules_markdown(),
        sharing: _filled(sharing, KEYS_BEGIN, pool_keys_markdown(), KEYS_END),
        peers: _filled(peers, TABLES_BEGIN, peers_markdown() + "\n", TABLES_END),
        memory: _filled(memory, FITS_BEGIN, what_fits_markdown(), FITS_END),
        DOCS / "reference" / "config.md": config_markdown(),
    }
    return pages | {DOCS / "llms.txt": llms_text(pages)}


def _filled(page: Path, begin: str, text: str, end: str) -> str:
    """Return a page's text with `text` between the lines `begin` and `end`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


# ---------------------------------------------------------------- the modules


def modules_markdown() -> str:
    """Return a Markdown page with every module of the package and its first sentence, folder by folder."""
    head = """# Modules

This page lists every file of the package with the first sentence of its docstring, made by `make docs-sources`.
[Architecture](architecture.md) explains the order of the folders.

The root of the repository is the package itself.
"""
    parts = [f"{head}\n{_files(sorted(ROOT.glob('*.py')))}"]
    for folder in FOLDERS:
        for package in sorted(path.parent for path in (ROOT / folder).rglob("__init__.py")):
            modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
            name = package.relative_to(ROOT).as_posix()
            parts.append(f"## `{name}/`\n\n{first_sentence(package / '__init__.py')}\n\n" + _files(modules))
    return "\n".join(parts).rstrip("\n") + "\n"


def _files(modules: list[Path]) -> str:
    if not modules:
        return ""
    lines = [f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |\n" for path in modules]
    return "| module | what it does |\n| --- | --- |\n" + "".join(lines)


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring. Raises ValueError unless it is there and ends with a full stop,
    since a line that wraps would be shown as half a sentence."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = docstring.partition("\n")[0]
    if not line.endswith("."):
        raise ValueError(f"{path}: the docstring begins with {line!r}, expected a whole sentence with a full stop")
    return line


# ---------------------------------------------------------------- the configuration


def config_markdown() -> str:
    """Return a Markdown page with every key of a run's YAML file. It has each key's type, default, meaning and effect,
    from the sections' classes."""
    from config_reference import reference_markdown

    from headrace.trainers.simulation.config import SimulationConfig

    head = """# Configuration reference

This page lists every key of a run, made from the sections' classes by `make docs-sources`. A key is written
`section.key=value` on the command line and below its section in a YAML file; `null` stands for `unset`. Setting a key
that has no effect in a run is an error, so that no setting is silently ignored. `headrace train CONFIG --dry-run`
prints all keys of a run.
"""
    return f"{head}\n{reference_markdown({'simulation': SimulationConfig}).strip()}\n"


def pool_keys_markdown() -> str:
    """Return, as Markdown, every key of the file of a simulated pool."""
    from config_reference import keys_markdown

    from headrace.trainers.pool.simulation.config import PoolSection, TenantSection

    return f"\n{keys_markdown({'pool': PoolSection, 'tenants.NAME': TenantSection}, '###')}\n\n"


# ---------------------------------------------------------------- llms.txt


def llms_text(made: Mapping[Path, str]) -> str:
    """Return an index of the pages for language models (https://llmstxt.org): titles, links and first paragraphs.

    made: texts of the generated pages, which need not be on disk yet.
    """
    title, summary = _title_and_summary(DOCS / "index.md", made)
    parts, listed = [f"# {title}\n\n> {summary}\n"], set[str]()
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    for heading, pages in _sections(nav):
        lines = []
        for page in (page for page in pages if page not in listed):
            listed.add(page)
            title, summary = _title_and_summary(DOCS / page, made)
            lines.append(f"- [{title}]({page}): {summary}\n")
        parts.append(f"\n## {heading}\n\n" + "".join(lines))
    return "".join(parts)


def _sections(nav: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of the site's navigation, those of a group one by one: (heading, its pages)."""
    for entry in nav:
        for heading, content in entry.items():
            if isinstance(content, str):
                yield heading, [content]
            elif pages := [page for item in content for page in item.values() if isinstance(page, str)]:
                yield heading, pages
            else:
                yield from _sections(content)


def _title_and_summary(page: Path, made: Mapping[Path, str]) -> tuple[str, str]:
    """Return a page's title, and its first paragraph on one line."""
    head, _, body = (made.get(page) or page.read_text(encoding="utf-8")).partition("\n")
    paragraph = next(part for part in body.split("\n\n") if part.strip() and not part.strip().startswith(("!", "<")))
    return head.removeprefix("# "), " ".join(paragraph.split())


if __name__ == "__main__":
    sys.exit(main())
