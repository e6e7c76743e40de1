"""Writes the generated pages of the documentation: the tree in architecture.md, the config reference and llms.txt.

    python tools/docs_sources.py

Run it after a module, a config key or a page has come, gone or changed its first line. A test compares the files.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("codecs", "dataplane", "actors", "trainers", "bench")
TREE_BEGIN, TREE_END = "<!-- tree: made by tools/docs_sources.py -->\n", "<!-- end of the tree -->\n"
PAGES = {
    "Start": ("start.md", "concepts.md"),
    "Concepts": ("data-plane.md", "training.md", "weights.md", "architecture.md"),
    "How-to": ("how-to/*.md",),
    "Reference": ("reference/*.md",),
    "Figures": ("benchmarks.md",),
}


def main() -> int:
    """Write every generated file; returns the exit code."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
    return 0


def generated() -> dict[Path, str]:
    """The text that each generated file should have."""
    architecture = DOCS / "architecture.md"
    before, _, rest = architecture.read_text(encoding="utf-8").partition(TREE_BEGIN)
    _, _, after = rest.partition(TREE_END)
    return {
        architecture: f"{before}{TREE_BEGIN}{tree_markdown()}{TREE_END}{after}",
        DOCS / "reference" / "config.md": config_markdown(),
        DOCS / "llms.txt": llms_text(),
    }


# ---------------------------------------------------------------- the tree


def tree_markdown() -> str:
    """Every module of the package with the first line of its docstring, folder by folder."""
    parts = [
        f"\n### The root\n\nThe root of the repository is the package itself.\n\n{_files(sorted(ROOT.glob('*.py')))}"
    ]
    for folder in FOLDERS:
        for package in sorted(path.parent for path in (ROOT / folder).rglob("__init__.py")):
            modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
            name = package.relative_to(ROOT).as_posix()
            parts.append(f"### `{name}/`\n\n{first_line(package / '__init__.py')}\n\n" + _files(modules))
    return "\n".join(parts)


def _files(modules: list[Path]) -> str:
    if not modules:
        return ""
    lines = [f"| `{path.name}` | {first_line(path).replace('|', chr(92) + '|')} |\n" for path in modules]
    return "| module | what it does |\n| --- | --- |\n" + "".join(lines)


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path}: has no docstring, expected one that says what the module does")
    return docstring.splitlines()[0]


# ---------------------------------------------------------------- the configuration


def config_markdown() -> str:
    """Every key of a run's YAML file with its type, default and meaning, made from the sections' classes."""
    from headrace.trainers.config.config import Config

    head = """# Configuration reference

Made from the sections' classes by `make docs-sources`. A key is written `section.key=value` on the command line and
below its section in a YAML file; `null` stands for None. `headrace train CONFIG --dry-run` prints all keys of a run.
"""
    return head + "".join(f"\n{section}" for section in _sections("", Config))


def _sections(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """The table of each section below `model`, then those of the sections inside it."""
    rows, inner = [], []
    schema = model.model_json_schema()
    meanings = _attribute_docstrings(model)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner.append((f"{prefix}{name}", field.annotation))
            continue
        default = field.get_default()
        meaning = meanings.get(name, "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(schema['properties'][name], schema)} | `{_yaml(default)}` | {meaning} |\n")
    if rows:
        summary = " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
        table = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)
        yield f"## `{prefix.rstrip('.')}`\n\n{summary}\n\n{table}"
    for name, section in inner:
        yield from _sections(f"{name}.", section)


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> the docstring below the field, for the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(field.target, ast.Name):
                found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def _type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in schema:
        return " or ".join(_type(option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {"integer": "whole number", "boolean": "true or false", "array": "list", "object": "mapping"}
    named = kind.get(schema.get("type", ""), {"string": "text"}.get(schema.get("type", ""), schema.get("type", "any")))
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS if name in schema]
    return " ".join([named, ", ".join(bounds)]).strip()


def _yaml(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or '""'


# ---------------------------------------------------------------- llms.txt


def llms_text() -> str:
    """An index of the pages for language models (https://llmstxt.org): titles, links and first sentences."""
    title, summary = _title_and_summary(DOCS / "index.md")
    parts = [f"# {title}\n\n> {summary}\n"]
    for heading, patterns in PAGES.items():
        lines = []
        for page in (page for pattern in patterns for page in sorted(DOCS.glob(pattern))):
            title, summary = _title_and_summary(page)
            lines.append(f"- [{title}]({page.relative_to(DOCS).as_posix()}): {summary}\n")
        parts.append(f"\n## {heading}\n\n" + "".join(lines))
    return "".join(parts)


def _title_and_summary(page: Path) -> tuple[str, str]:
    """A page's title, and its first paragraph in one line."""
    head, _, body = page.read_text(encoding="utf-8").partition("\n")
    paragraph = next(part for part in body.split("\n\n") if part.strip() and not part.strip().startswith(("!", "<")))
    return head.removeprefix("# "), " ".join(paragraph.split())


if __name__ == "__main__":
    sys.exit(main())
