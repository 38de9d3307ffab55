"""The HTTP endpoints that one release of vLLM registers."""

from __future__ import annotations

import ast
from typing import Any

from lab.catalogue.source_tree import SourceTree, last_name

_METHODS = {"get", "post", "put", "delete", "patch", "head", "websocket", "api_route"}


def read_endpoints(tree: SourceTree) -> list[dict[str, Any]]:
    """Every route of the server's own code: method and path. What a route needs to be there stands in endpoints.py."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for file in tree.files:
        relative = file.relative_to(tree.root / "vllm").as_posix()
        if not relative.startswith("entrypoints/"):
            continue
        for method, path in _routes(tree.parse(file)):
            rows[(path, method)] = {"method": method, "path": path}
    return [rows[key] for key in sorted(rows)]


def _routes(tree: ast.Module) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and last_name(d.func) in _METHODS]
            found += [(last_name(call.func).upper(), path) for call in calls if (path := _path(call)) is not None]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("Mount", "mount"):  # another application, such as /metrics
            path = _path(node)
            found += [("GET", path)] if path is not None else []
    return found


def _path(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    value = first.value if isinstance(first, ast.Constant) else None
    return value if isinstance(value, str) and value.startswith("/") else None
