"""The text of the house is true and readable: what it names exists, and its sentences are whole and plain."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

from headrace.tests.house import tree
from headrace.tests.house.tree import Text

FOREIGN = {
    # Names of other libraries and of the environment.
    *("RankAwareSampler", "SeqlenBalancedSampler", "StreamingDataLoader", "MoEAuxLossAutoScaler"),
    *("MC_TCP_BIND_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "NCCL_SOCKET_FAMILY",
    *("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"),
    *("kv_batch_get_by_meta", "get_data", "kv_list", "get_meta", "register_partition", "save_checkpoint"),
    *("CUDA_VISIBLE_DEVICES", "tensor_parallel/layers.py"),
    # Files that a reader makes, and parts of names of metrics.
    *("small/config.yaml", "_at_", "_sum", "_max_over_mean"),
}
"""Names in text that are not ours."""

# ---------------------------------------------------------------- what is named exists


@functools.cache
def _written() -> tuple[Text, ...]:
    """Return the docstrings and comments of the whole checkout, and the pages."""
    in_code = [text for path in tree.modules() for text in (*tree.docstrings(path), *tree.comments(path))]
    return (*in_code, *tree.page_texts())


def test_every_path_in_text_exists() -> None:
    known = {file[at:] for file in tree.files() for at in [0, *(match.end() for match in re.finditer("/", file))]}
    pattern = re.compile(r"(?<![\w/.:@~${}-])(?:[\w-]+/)+[\w-]+\.(?:py|pyi|md|yaml|sh|toml|js)(?![\w/])")
    wrong = [
        f"{text.place}: {path}"
        for text in _written()
        for path in pattern.findall(text.text)
        if path not in known and path not in FOREIGN
    ]
    assert wrong == []


def test_every_name_of_code_in_text_exists() -> None:
    """Members of our classes, calls, and names that only code has are checked. They are written as `Class.member`, as
    `name(...)`, and in camel case, in capitals with an underscore, or with an underscore in front."""
    classes, names = _classes(), _names()
    wrong: list[str] = []
    for text in _written():
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text.text):
            owner = re.match(r"([A-Za-z]\w*)\.([A-Za-z_]\w*)", code)
            alone = re.match(
                r"(?:([A-Za-z_]\w*)\(|([A-Z][a-z]+[A-Z]\w*)$|([A-Z][A-Z0-9]*_[A-Z0-9_]+)$|(_[a-z]\w*)$)", code
            )
            if owner and owner[1] in classes and not _has(classes, owner[1], owner[2]):
                wrong.append(f"{text.place}: {code}")
            elif alone and (name := next(filter(None, alone.groups()))) not in names and name not in FOREIGN:
                wrong.append(f"{text.place}: {code}")
    assert wrong == []


def _classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return (members, names of base classes) of each class of ours."""
    found: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in tree.modules():
        for node in tree.definitions(path):
            if isinstance(node, ast.ClassDef):
                members, bases = found[node.name]
                bases |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                for inner in ast.walk(node):
                    members |= _made(inner)
    return dict(found)


def _made(node: ast.AST) -> set[str]:
    """Return the name that a node defines or assigns."""
    if isinstance(node, tree.Definition):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    return {node.attr} if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else set()


def _has(classes: dict[str, tuple[set[str], set[str]]], owner: str, member: str) -> bool:
    """Return whether a class, or a base class of it, has `member`. Classes of other libraries have every member."""
    if owner not in classes:
        return owner not in ("object", "Protocol", "ABC", "Generic", "")
    members, bases = classes[owner]
    return member in members or any(_has(classes, base, member) for base in bases if base != owner)


def _names() -> set[str]:
    """Return every name that the code of the checkout defines or uses."""
    found: set[str] = set()
    for path in tree.modules():
        for node in tree.nodes(path):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, tree.Definition):
                found.add(node.name)
            elif isinstance(node, (ast.arg, ast.keyword)):
                found.add(node.arg or "")
            elif isinstance(node, ast.alias):
                found.add((node.asname or node.name).rpartition(".")[2])
    return found


# ---------------------------------------------------------------- sentences


def test_first_sentences_stand_on_the_first_line() -> None:
    """A list of modules, help and an editor's hint show the first line alone."""
    wrapped = [
        f"{path}:{getattr(node, 'lineno', 1)} {line}"
        for path in tree.modules()
        for node in (*tree.nodes(path)[:1], *tree.definitions(path))
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and (line := (ast.get_docstring(node) or "").partition("\n")[0])
        and not re.search(r"[.?!][\"`)]*(\s|$)", line)
    ]
    assert wrapped == []


BANNED = re.compile(
    r"\b(?:(?:no|every|some|any)body|anew|whoever|(?<!anyone )who has|who listens|imposition|makes good|so that it may"
    r"|(?:is|are|be|been|being|was|were) told(?! apart)|told of|(?:gets?|got) on(?! t)"
    r"|[Hh]ave (?:the (?:workers?|thread|process|pool)|all workers|vLLM) [a-z]+"
    r"|(?:bytes|tokens|rows|seconds(?! a call)|samples|prompts|updates|calls|steps)"
    r" a (?:token|row|step|second|prompt|call|GPU))\b",
    re.IGNORECASE,
)
"""Words that read as translated: persons in place of processes, "a" for "per", and turns that are not English idiom."""


def test_sentences_are_plain_english() -> None:
    """Docstrings and comments of the package and tools, errors, and pages are free of the turns in BANNED."""
    texts = [text for path in tree.package() for text in (*tree.strings(path), *tree.comments(path))]
    found = [
        f"{text.place}: {match[0]} in {text.text[max(0, match.start() - 40) : match.end() + 40]!r}"
        for text in (*texts, *tree.page_texts())
        for match in BANNED.finditer(re.sub(r"\s+", " ", text.text))
    ]
    assert found == []
