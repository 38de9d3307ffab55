"""The Prometheus metrics that one release of vLLM defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from lab.catalogue.source_tree import Evaluator, SourceTree, is_plain, last_name

_TYPES = ("gauge", "counter", "histogram", "summary")
_NAME = re.compile(r"vllm:[a-zA-Z0-9_]+")
# Helper classes are handed the labels of the logger that makes them; the first engine (V0) had no `engine` label.
_BASE_LABELS = {"vllm.engine.metrics": ["model_name"]}
_BASE_LABELS_V1 = ["model_name", "engine"]


def read_metrics(tree: SourceTree) -> list[dict[str, Any]]:
    """Every metric the release can export: exposition name, type, labels, and when it shows."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    mentioned: set[str] = set()
    for file in tree.files:
        text = file.read_text(encoding="utf-8")
        if "vllm:" not in text:
            continue
        module = ".".join(file.relative_to(tree.root).with_suffix("").parts)
        for row in _definitions(tree, module):
            rows.setdefault((row["name"], row["engine"]), row)
        mentioned |= {n for n in _constants(tree.parse(file)) if _NAME.fullmatch(n)}
    known = {name for name, _ in rows} | {name.removesuffix("_total") for name, _ in rows}
    for name in sorted(mentioned - known):
        if any(other.startswith(f"{name}_") for other in known | mentioned):
            continue  # a prefix that the code puts names together from
        rows[(name, "any")] = {"name": name, "type": "unknown", "engine": "any", "shown": "conditional"}
    return sorted(rows.values(), key=lambda r: (r["name"], r["engine"]))


def _constants(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _definitions(tree: SourceTree, module: str) -> Iterator[dict[str, Any]]:
    evaluator = Evaluator(tree)
    path = tree.path_of(module)
    assert path is not None
    for function, call, tests in _calls(tree.parse(path)):
        kind = next((t for t in _TYPES if t in last_name(call.func).lower()), None)
        if kind is None and last_name(call.func) in ("info_gauge", "info"):
            kind = "gauge"
        if kind is None:
            continue
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        name_node = keywords.get("name") or (call.args[0] if call.args else None)
        scope = _local_values(evaluator, module, function)
        name = evaluator.value(name_node, module, scope)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            continue
        labels = evaluator.value(keywords["labelnames"], module, scope) if "labelnames" in keywords else None
        yield _row(name, kind, labels, module, tests)


def _row(name: str, kind: str, labels: Any, module: str, tests: list[str]) -> dict[str, Any]:
    # Every counter is exposed with _total, whether or not its definition says so.
    exposed = name.removesuffix("_total") + "_total" if kind == "counter" else name
    hidden = any("show_hidden" in t for t in tests)
    in_logger = module.endswith(("metrics.loggers", "engine.metrics"))
    shown = "hidden" if hidden else "always" if in_logger and not tests else "conditional"
    row: dict[str, Any] = {"name": exposed, "type": kind, "shown": shown}
    row["engine"] = "V1" if ".v1." in module else "V0" if module == "vllm.engine.metrics" else "any"
    if isinstance(labels, list | tuple) and is_plain(labels):
        row["labels"] = list(labels)
    return row


def _calls(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | None, ast.Call, list[str]]]:
    """Every call with the function it stands in and the conditions around it."""

    def visit(
        node: ast.AST, function: ast.FunctionDef | None, tests: list[str]
    ) -> Iterator[tuple[ast.FunctionDef | None, ast.Call, list[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child, tests
            if isinstance(child, ast.FunctionDef):
                yield from visit(child, child, [])
            elif isinstance(child, ast.If):
                yield from visit(child, function, [*tests, ast.unparse(child.test)])
            else:
                yield from visit(child, function, tests)

    yield from visit(tree, None, [])


def _local_values(evaluator: Evaluator, module: str, function: ast.FunctionDef | None) -> dict[str, Any]:
    """Names that the function sets to something constant, in the order it sets them."""
    if function is None:
        return {}
    parameters = [a.arg for a in function.args.args]
    scope: dict[str, Any] = {p: list(_BASE_LABELS.get(module, _BASE_LABELS_V1)) for p in parameters if p == "labelnames"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = evaluator.value(node.value, module, scope)
            if is_plain(value):
                scope[node.targets[0].id] = value
    return scope
