"""The environment variables that one release of vLLM reads."""

from __future__ import annotations

import ast
import re
from typing import Any

from lab.catalogue.source_tree import Evaluator, SourceTree, is_plain

_QUOTED_NAME = re.compile(r"""["'](VLLM_[A-Z0-9_]+)["']""")


def read_environment(tree: SourceTree) -> list[dict[str, Any]]:
    """Every variable the release declares in `vllm/envs.py` or names in quotes elsewhere, as plain rows.

    A name in quotes outside `envs.py` is most often an `os.environ` look-up. It is kept, marked `elsewhere`, because a
    variable must not be called without effect while the code still mentions it.
    """
    path = tree.path_of("vllm.envs")
    declared = _declared(tree) if path is not None else {}
    rows = [{"name": name, **known} for name, known in sorted(declared.items())]
    mentioned = {name for file in tree.files if file != path for name in _QUOTED_NAME.findall(file.read_text(encoding="utf-8"))}
    rows += [{"name": name, "elsewhere": True} for name in sorted(mentioned - set(declared))]
    return rows


def _declared(tree: SourceTree) -> dict[str, dict[str, Any]]:
    path = tree.path_of("vllm.envs")
    assert path is not None
    body = tree.parse(path)
    evaluator = Evaluator(tree)
    defaults: dict[str, Any] = {}
    names: set[str] = set()
    for node in ast.walk(body):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    defaults[statement.target.id] = evaluator.value(statement.value, "vllm.envs", {})
        elif isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Dict):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(t, ast.Name) and t.id == "environment_variables" for t in targets):
                names |= {k.value for k in node.value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        if name in defaults and is_plain(defaults[name]):
            rows[name]["default"] = defaults[name]
    return rows
