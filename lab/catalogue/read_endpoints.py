"""The HTTP endpoints that one release of vLLM registers."""

from __future__ import annotations

import ast
from typing import Any

from lab.catalogue.source_tree import SourceTree, last_name

_METHODS = {"get", "post", "put", "delete", "patch", "head", "websocket", "api_route"}


def read_endpoints(tree: SourceTree) -> list[dict[str, Any]]:
    """Every route of the server's own code: method, path, and whether it stands in a development-only file."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for file in tree.files:
        relative = file.relative_to(tree.root / "vllm").as_posix()
        if not relative.startswith("entrypoints/"):
            continue
        for method, path, in_dev_block in _routes(tree.parse(file)):
            row: dict[str, Any] = {"method": method, "path": path}
            if in_dev_block or "/dev/" in relative:
                row["dev_mode"] = True
            rows[(path, method)] = row
    return [rows[key] for key in sorted(rows)]


def _routes(tree: ast.Module) -> list[tuple[str, str, bool]]:
    found = []
    dev_blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "VLLM_SERVER_DEV_MODE" in ast.unparse(n.test)]
    inside_dev = {id(child) for block in dev_blocks for child in ast.walk(block)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or last_name(decorator.func) not in _METHODS or not decorator.args:
                continue
            path = decorator.args[0]
            if isinstance(path, ast.Constant) and isinstance(path.value, str) and path.value.startswith("/"):
                found.append((last_name(decorator.func).upper(), path.value, id(node) in inside_dev))
    return found
