"""Reads an unpacked vLLM wheel as text: finds definitions and works out their constant values, importing nothing.

Importing old releases would need their old torch, and running code from a wheel to learn its flags would be a strange
habit for a careful tool. So this is a small interpreter of expressions: what it cannot know is `UNKNOWN`, never a guess.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise AssertionError("an unknown value decides nothing")


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class ClassRef:
    """A class of the tree."""

    module: str
    name: str
    node: ast.ClassDef = field(compare=False, repr=False)


@dataclass(frozen=True)
class FunctionRef:
    """A function of the tree."""

    module: str
    name: str
    node: ast.FunctionDef = field(compare=False, repr=False)


@dataclass(frozen=True)
class External:
    """A name from outside the tree: a builtin, the standard library, a dependency."""

    dotted: str


@dataclass(frozen=True)
class TypeUse:
    """A type with arguments, such as `Literal["a", "b"]` or `list[int]`."""

    origin: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Wrapped:
    """A call whose meaning matters but whose result does not: `optional_type(int)`, `parse_type(json.loads)`."""

    name: str
    arguments: tuple[Any, ...]


Definition = tuple[str, ast.AST]


class SourceTree:
    """The Python files of one release."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        """Every Python file of the package, in a stable order."""
        return tuple(sorted((self.root / "vllm").rglob("*.py")))

    def path_of(self, module: str) -> Path | None:
        """The file of a dotted module name."""
        base = self.root.joinpath(*module.split("."))
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    @functools.cache  # noqa: B019 (one tree lives as long as its release is read)
    def parse(self, path: Path) -> ast.Module:
        """The syntax tree of a file; an empty one if this Python cannot parse it."""
        try:
            return ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])

    @functools.cache  # noqa: B019
    def names_of(self, module: str) -> Mapping[str, ast.AST]:
        """What a module defines or imports at its top level, last definition wins."""
        path = self.path_of(module)
        if path is None:
            return {}
        return {name: node for node in _top_level(self.parse(path).body) for name in _bound_names(node)}

    def resolve(self, module: str, name: str, depth: int = 0) -> Definition | None:
        """Where a name used in a module is really defined, following imports inside the tree."""
        node = self.names_of(module).get(name)
        if node is None or depth > 12:
            return None
        if isinstance(node, ast.ImportFrom):
            origin = self._absolute(module, node)
            wanted = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            if self.path_of(f"{origin}.{wanted}") is not None and wanted not in self.names_of(origin):
                return f"{origin}.{wanted}", ast.Module(body=[], type_ignores=[])
            found = self.resolve(origin, wanted, depth + 1)
            return found if found is not None else (origin, node)
        return module, node

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        path = self.path_of(module)
        package = module.split(".")
        if path is not None and path.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, looking into `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        elif isinstance(statement, ast.Try | ast.With):
            yield from _top_level(statement.body)


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.ImportFrom | ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0]


_SAFE_CALLS: Mapping[str, Any] = {
    "sorted": sorted, "list": list, "tuple": tuple, "set": set, "dict": dict, "int": int, "float": float, "str": str,
    "len": len, "frozenset": frozenset,
}  # fmt: skip


class Evaluator:
    """Works out the value of an expression, or says that it cannot."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree

    def value(self, node: ast.AST | None, module: str, scope: Mapping[str, Any], depth: int = 0) -> Any:
        """The value of `node` as seen in `module`, with `scope` for local names."""
        if node is None or depth > 30:
            return UNKNOWN
        method = getattr(self, f"_{type(node).__name__}", None)
        return UNKNOWN if method is None else method(node, module, scope, depth + 1)

    def _Constant(self, node: ast.Constant, *_: Any) -> Any:  # noqa: N802
        return node.value

    def _Name(self, node: ast.Name, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        if node.id in scope:
            return scope[node.id]
        found = self.tree.resolve(module, node.id)
        if found is None:
            return External(node.id)
        return self._defined(node.id, *found, depth)

    def _defined(self, name: str, module: str, node: ast.AST, depth: int) -> Any:
        match node:
            case ast.ClassDef():
                return ClassRef(module, node.name, node)
            case ast.FunctionDef():
                return FunctionRef(module, node.name, node)
            case ast.Assign() | ast.AnnAssign():
                return self.value(node.value, module, {}, depth)
            case ast.ImportFrom():
                return External(f"{node.module}.{name}")
            case ast.Import():
                return External(name)
            case ast.Module():
                return External(f"module:{module}")
        return UNKNOWN

    def _Attribute(self, node: ast.Attribute, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        owner = self.value(node.value, module, scope, depth)
        if isinstance(owner, ClassRef):
            return self.attribute(owner, node.attr, depth)
        if isinstance(owner, External):
            if owner.dotted.startswith("module:"):
                inner = owner.dotted.removeprefix("module:")
                found = self.tree.resolve(inner, node.attr)
                return UNKNOWN if found is None else self._defined(node.attr, *found, depth)
            return External(f"{owner.dotted}.{node.attr}")
        if node.attr == "value" and is_plain(owner):  # an enum member: we already stand for it by its value
            return owner
        return UNKNOWN

    def attribute(self, owner: ClassRef, name: str, depth: int = 0) -> Any:
        """The value of a class attribute; for a dataclass field, its default."""
        for cls in self.lineage(owner):
            for statement in cls.node.body:
                if name not in _bound_names(statement):
                    continue
                if isinstance(statement, ast.AnnAssign | ast.Assign):
                    return self.default_of(statement.value, cls.module, depth)
                if isinstance(statement, ast.FunctionDef):
                    return FunctionRef(cls.module, statement.name, statement)
        return UNKNOWN

    def lineage(self, cls: ClassRef) -> list[ClassRef]:
        """The class and its bases inside the tree, nearest first."""
        found = [cls]
        for base in cls.node.bases:
            value = self.value(base, cls.module, {})
            if isinstance(value, ClassRef) and value not in found:
                found.extend(c for c in self.lineage(value) if c not in found)
        return found

    def default_of(self, node: ast.expr | None, module: str, depth: int = 0) -> Any:
        """The default that a dataclass or pydantic field declares."""
        if isinstance(node, ast.Call):
            called = last_name(node.func)
            keywords = {k.arg: k.value for k in node.keywords if k.arg}
            if called in ("field", "Field"):
                if "default" in keywords:
                    return self.value(keywords["default"], module, {}, depth)
                if "default_factory" in keywords:
                    return self._made_by(keywords["default_factory"], module, depth)
                return self.value(node.args[0], module, {}, depth) if node.args else UNKNOWN
        return self.value(node, module, {}, depth)

    def _made_by(self, factory: ast.expr, module: str, depth: int) -> Any:
        if isinstance(factory, ast.Lambda):
            return self.value(factory.body, module, {}, depth)
        made = self.value(factory, module, {}, depth)
        if isinstance(made, External) and made.dotted in ("list", "dict", "set", "tuple"):
            return {"list": [], "dict": {}, "set": [], "tuple": []}[made.dotted]
        return Wrapped("instance", (made,)) if isinstance(made, ClassRef) else UNKNOWN

    def _Call(self, node: ast.Call, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        name = last_name(node.func)
        if name in ("field", "Field"):
            return self.default_of(node, module, depth)
        arguments = [self.value(a, module, scope, depth) for a in node.args]
        if name == "get_field" and len(arguments) == 2 and isinstance(arguments[0], ClassRef):
            return self.attribute(arguments[0], arguments[1], depth)
        if name == "get_args" and len(arguments) == 1 and isinstance(arguments[0], TypeUse):
            return list(arguments[0].arguments)
        if isinstance(node.func, ast.Attribute):
            known = self._method(node.func, arguments, module, scope, depth)
            if known is not UNKNOWN:
                return known
        if name in _SAFE_CALLS and not node.keywords and all(is_plain(a) for a in arguments):
            try:
                return _SAFE_CALLS[name](*arguments)
            except (TypeError, ValueError):
                return UNKNOWN
        called = self.value(node.func, module, scope, depth)
        if isinstance(called, ClassRef):
            return Wrapped("instance", (called,))
        if isinstance(called, FunctionRef | External):
            return Wrapped(name, tuple(arguments))
        return UNKNOWN

    def _method(self, func: ast.Attribute, arguments: list[Any], module: str, scope: Mapping[str, Any], depth: int) -> Any:
        owner = self.value(func.value, module, scope, depth)
        if isinstance(owner, str) and func.attr in ("replace", "lower", "upper", "strip") and all(map(is_plain, arguments)):
            return getattr(owner, func.attr)(*arguments)
        if isinstance(owner, dict):
            if func.attr == "items":
                return list(owner.items())
            if func.attr in ("keys", "values"):
                return list(getattr(owner, func.attr)())
            if func.attr == "get" and arguments and is_plain(arguments[0]):
                return owner.get(*arguments)
            if func.attr == "pop" and arguments and is_plain(arguments[0]):
                return owner.pop(*arguments) if len(arguments) > 1 or arguments[0] in owner else UNKNOWN
        return UNKNOWN

    def _Subscript(self, node: ast.Subscript, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        owner = self.value(node.value, module, scope, depth)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        index = [self.value(i, module, scope, depth) for i in inner]
        if isinstance(owner, dict | list | tuple):
            try:
                return owner[index[0]]
            except (KeyError, IndexError, TypeError):
                return UNKNOWN
        if isinstance(owner, External):
            origin = owner.dotted.rsplit(".", 1)[-1].lower()
            if origin == "literal":  # Literal[Literal["a"], "b"] is Literal["a", "b"]
                index = [a for i in index for a in (i.arguments if isinstance(i, TypeUse) else (i,))]
            return TypeUse(origin, tuple(index))
        if isinstance(owner, ClassRef):
            return owner
        return UNKNOWN

    def _BinOp(self, node: ast.BinOp, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        left = self.value(node.left, module, scope, depth)
        right = self.value(node.right, module, scope, depth)
        if isinstance(node.op, ast.BitOr):
            return TypeUse("union", (left, right))
        if not (is_plain(left) and is_plain(right)):
            return UNKNOWN
        try:
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Mult():
                    return left * right
                case ast.Pow():
                    return left**right if isinstance(right, int) and abs(right) < 64 else UNKNOWN
                case ast.LShift():
                    return left << right if right < 64 else UNKNOWN
                case ast.Div():
                    return left / right
                case ast.Sub():
                    return left - right
        except (TypeError, ZeroDivisionError):
            return UNKNOWN
        return UNKNOWN

    def _UnaryOp(self, node: ast.UnaryOp, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        value = self.value(node.operand, module, scope, depth)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        if isinstance(node.op, ast.Not) and isinstance(value, bool):
            return not value
        return UNKNOWN

    def _Compare(self, node: ast.Compare, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        if len(node.ops) != 1:
            return UNKNOWN
        left = self.value(node.left, module, scope, depth)
        right = self.value(node.comparators[0], module, scope, depth)
        if isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(left, str) and isinstance(right, dict | list):
            return (left in right) == isinstance(node.ops[0], ast.In)
        if isinstance(node.ops[0], ast.Eq | ast.NotEq) and is_plain(left) and is_plain(right):
            return (left == right) == isinstance(node.ops[0], ast.Eq)
        return UNKNOWN

    def _items(self, nodes: list[ast.expr], module: str, scope: Mapping[str, Any], depth: int) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self.value(node.value, module, scope, depth)
                found.extend(inner if isinstance(inner, list | tuple) else [UNKNOWN])
            else:
                found.append(self.value(node, module, scope, depth))
        return found

    def _List(self, node: ast.List, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        return self._items(node.elts, module, scope, depth)

    def _Tuple(self, node: ast.Tuple, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        return tuple(self._items(node.elts, module, scope, depth))

    def _Set(self, node: ast.Set, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        return self._items(node.elts, module, scope, depth)

    def _Dict(self, node: ast.Dict, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:  # {**other}
                other = self.value(value, module, scope, depth)
                if not isinstance(other, dict):
                    return UNKNOWN
                made.update(other)
                continue
            known = self.value(key, module, scope, depth)
            if not isinstance(known, str | int):
                return UNKNOWN
            made[known] = self.value(value, module, scope, depth)
        return made

    def _JoinedStr(self, node: ast.JoinedStr, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        parts = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = self.value(inner, module, scope, depth)
            if not isinstance(value, str | int):
                return UNKNOWN
            parts.append(str(value))
        return "".join(parts)

    def _IfExp(self, node: ast.IfExp, module: str, scope: Mapping[str, Any], depth: int) -> Any:  # noqa: N802
        test = self.value(node.test, module, scope, depth)
        if not isinstance(test, bool):
            return UNKNOWN
        return self.value(node.body if test else node.orelse, module, scope, depth)


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_plain(value: Any) -> bool:
    """Whether a value is wholly known and made of plain Python data."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(is_plain(v) for v in value.values())
    return value is None or isinstance(value, str | int | float | bool)
