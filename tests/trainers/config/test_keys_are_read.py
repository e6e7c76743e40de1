"""Every key of the configuration is read somewhere in the package; one that nothing reads fails here."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import headrace

ROOT = Path(headrace.__file__).resolve().parent
FLOORS = ("dataplane", "actors", "trainers", "cli")
Nodes = tuple[ast.AST, ...]
NOT_READERS = ("trainers/config/", "trainers/run/checks/dry_run.py")
"""Files that name keys but do nothing by them: declarations, checks, the reference, and the text of a dry run."""


def package_sources() -> dict[str, str]:
    paths = [path for floor in FLOORS for path in [ROOT / floor, *(ROOT / floor).rglob("*.py")] if path.is_file()]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@functools.cache
def nodes_of(text: str) -> Nodes:
    """All nodes of a module's syntax tree, which are walked several times."""
    return tuple(ast.walk(ast.parse(text)))


def section_classes(modules: Mapping[str, Nodes]) -> dict[str, ast.ClassDef]:
    """Name -> declaration of every subclass of Section that has keys of its own."""
    classes = [node for nodes in modules.values() for node in nodes if isinstance(node, ast.ClassDef)]
    found: dict[str, ast.ClassDef] = {}
    for _ in range(3):  # sections of sections
        found |= {node.name: node for node in classes if bases_of(node) & {"Section", *found}}
    return found


def bases_of(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base) for base in node.bases}


def keys_of(section: ast.ClassDef) -> list[str]:
    return [
        node.target.id for node in section.body if isinstance(node, ast.AnnAssign) if isinstance(node.target, ast.Name)
    ]


class Names:
    """Names that stand for a section: in the whole package (fields and keys of its type), and in one module."""

    def __init__(self, sections: Mapping[str, ast.ClassDef], modules: Mapping[str, Nodes]) -> None:
        self.sections = sections
        self.fields: dict[str, set[str]] = defaultdict(set)
        for nodes in modules.values():
            for owner in (node for node in nodes if isinstance(node, ast.ClassDef)):
                for node in owner.body:
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        self.fields[node.target.id] |= self.mentioned(node.annotation)

    def mentioned(self, annotation: ast.AST | None) -> set[str]:
        """Sections that an annotation mentions, bare or inside a container or a string."""
        if annotation is None:
            return set()
        named = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} & set(self.sections)
        for _ in range(2):  # a section's own keys are also those of the section that it extends
            named |= {base for name in named for base in bases_of(self.sections[name])} & set(self.sections)
        return named

    def of(self, node: ast.AST, local: Mapping[str, set[str]]) -> set[str]:
        """Sections that an expression may stand for."""
        if isinstance(node, ast.Name):
            return local.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return self.fields.get(node.attr, set()) | local.get(node.attr, set())
        if isinstance(node, ast.Call):  # a constructor, or a function that is given the class it returns
            return self.mentioned(node.func).union(*map(self.mentioned, node.args))
        if isinstance(node, ast.IfExp):  # a default where None was given
            return self.of(node.body, local) | self.of(node.orelse, local)
        return set()

    def local(self, nodes: Nodes) -> dict[str, set[str]]:
        """Names of one module: parameters, and what is assigned or looped over."""
        found: dict[str, set[str]] = defaultdict(set)
        for node in nodes:
            if isinstance(node, ast.arg):
                found[node.arg] |= self.mentioned(node.annotation)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] |= self.mentioned(node.returns)
        assigned = list(assignments(nodes))
        for _ in range(3):  # through a = config.b; c = a
            for target, value in assigned:
                name = (
                    target.id
                    if isinstance(target, ast.Name)
                    else target.attr
                    if isinstance(target, ast.Attribute)
                    else ""
                )
                found[name] |= self.of(value, found)
        return found


def assignments(nodes: Nodes) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter


def unread_keys(sources: Mapping[str, str]) -> set[str]:
    """`Section.key` of every key that no code reads as an attribute of something that is that section."""
    modules = {name: nodes_of(text) for name, text in sources.items()}
    sections = section_classes(modules)
    names = Names(sections, modules)
    read: set[str] = set()
    for name, nodes in modules.items():
        if name.startswith(NOT_READERS):
            continue
        local = names.local(nodes)
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read |= {f"{section}.{node.attr}" for section in names.of(node.value, local)}
            elif (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
            ):  # by names that stand in the module
                read |= {f"{section}.{text}" for section in names.of(node.args[0], local) for text in texts}
    for section in sections.values():  # a property of the section itself
        methods = [node for node in section.body if isinstance(node, ast.FunctionDef)]
        for method in (
            node for node in methods if any(ast.unparse(mark) == "property" for mark in node.decorator_list)
        ):
            for node in (node for node in ast.walk(method) if isinstance(node, ast.Attribute)):
                owners = {section.name} if ast.unparse(node.value) == "self" else names.of(node.value, {})
                read |= {f"{owner}.{node.attr}" for owner in owners}
    return {f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)} - read


def test_every_key_is_read() -> None:
    sources = package_sources()
    assert {"LossConfig", "RolloutConfig", "StoreConfig", "SimulationConfig", "RunConfig"} <= set(
        section_classes({name: nodes_of(text) for name, text in sources.items()})
    )
    assert unread_keys(sources) == set()


def test_a_key_that_nothing_reads_is_found() -> None:
    made_up = """
        class MadeUpConfig(Section):
            used: int = 1
            dead: int = 1
            kind: str = ""

        class Host:
            made_up: MadeUpConfig

        def consume(host: Host, other: Other) -> int:
            made = host.made_up
            return made.used + other.kind + other.dead
    """
    assert unread_keys({"made_up.py": textwrap.dedent(made_up)}) == {"MadeUpConfig.dead", "MadeUpConfig.kind"}
    whole = package_sources()
    name = "trainers/backends/config.py"
    whole[name] = whole[name].replace("    offload: bool", "    onload: bool = False\n    offload: bool", 1)
    assert unread_keys(whole) == {"TrainerConfig.onload"}
