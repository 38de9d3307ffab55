"""The names that one release registers for flags whose set of values is open: parsers, quantisations."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from lab.catalogue.source_tree import Evaluator, SourceTree, is_plain

# The flag, the class whose decorator registers a name, and the table of names that are registered lazily.
_MANAGERS = (
    ("--tool-call-parser", "ToolParserManager", "_TOOL_PARSERS_TO_REGISTER"),
    ("--reasoning-parser", "ReasoningParserManager", "_REASONING_PARSERS_TO_REGISTER"),
)
_QUANTIZATION = "vllm.model_executor.layers.quantization"


def read_values(tree: SourceTree) -> list[dict[str, Any]]:
    """One row a name: the flag it is a value of, and the name."""
    names: dict[str, set[str]] = {}
    for path in tree.files:
        text = path.read_text(encoding="utf-8")
        for flag, manager, table in _MANAGERS:
            if manager in text:
                names.setdefault(flag, set()).update(_registered(tree.parse(path), manager, table))
    if (package := tree.path_of(_QUANTIZATION)) is not None:
        names["--quantization"] = _methods(tree, package)
    return [{"flag": flag, "value": value} for flag in sorted(names) for value in sorted(names[flag])]


def _registered(body: ast.Module, manager: str, table: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(body):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"{manager}.register_module":
                    given = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "name")]
                    names |= {text for value in given for text in _texts(value)}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == table for target in targets):
                names |= {text for key in node.value.keys if key is not None for text in _texts(key)}
    return names


def _texts(node: ast.expr) -> set[str]:
    values = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def _methods(tree: SourceTree, path: Path) -> set[str]:
    """The names in QuantizationMethods (a Literal) or, before it, in the table QUANTIZATION_METHODS."""
    for node in tree.parse(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = targets[0].id if isinstance(targets[0], ast.Name) else ""
            if name == "QuantizationMethods" and isinstance(node.value, ast.Subscript):
                return _texts(node.value.slice)
            if name in ("QUANTIZATION_METHODS", "_QUANTIZATION_CONFIG_REGISTRY", "_QUANTIZATION_REGISTRY"):
                if isinstance(node.value, ast.Dict):
                    return {text for key in node.value.keys if key is not None for text in _texts(key)}
                value = Evaluator(tree).value(node.value, _QUANTIZATION, {})
                if isinstance(value, list) and is_plain(value):
                    return set(map(str, value))
    return set()
