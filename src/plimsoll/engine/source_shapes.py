"""What a Python file defines, read as a syntax tree: classes with their methods and attributes, and the words it uses.

Comments and docstrings' inner words do not count: a name that is only spoken of is not there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

ANY = "*"  # among the arguments of a function: it takes any others too


class ClassShape(NamedTuple):
    """One class: its methods with their arguments, and what it assigns to `self` or declares as a field."""

    methods: dict[str, tuple[str, ...]]
    attributes: frozenset[str]


class FileShape(NamedTuple):
    """One file."""

    classes: dict[str, ClassShape]
    functions: dict[str, tuple[str, ...]]
    words: frozenset[str]  # every name, attribute and text constant that the code uses
    assigned: frozenset[str]  # attributes of whatever object that get a value


class Sources(NamedTuple):
    """The files of one vLLM: how to read one by its path in the package, and which lie under a folder."""

    read: Callable[[str], str | None]  # None: there is no such file
    listed: Callable[[str], Sequence[str]]


@functools.lru_cache(maxsize=64)
def shape_of(text: str) -> FileShape | None:
    """What the text defines; None where this Python cannot parse it."""
    try:
        tree = ast.parse(text)
        return FileShape(_classes(tree), _functions(tree.body), *_words(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _classes(tree: ast.Module) -> dict[str, ClassShape]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found[node.name] = ClassShape(_functions(node.body), frozenset(_attributes(node)))
    return found


def _functions(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    return {node.name: _arguments(node.args) for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _arguments(given: ast.arguments) -> tuple[str, ...]:
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (*names, ANY) if given.kwarg is not None else tuple(names)


def _attributes(node: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for statement in node.body:
        names |= {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
    return names


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _words(tree: ast.Module) -> tuple[frozenset[str], frozenset[str]]:
    words: set[str] = set()
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                assigned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        elif isinstance(node, ast.alias):
            words.add(node.name)
    return frozenset(words), frozenset(assigned)
