"""Where in one release's source the records stand that a cut log still shows: a file and a line tell the release."""

from __future__ import annotations

import ast
from typing import Any

from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm.failure_texts import PLACED


def read_log_places(tree: SourceTree) -> list[dict[str, Any]]:
    """One row a record: its file and line as a log's prefix has them, and its words."""
    found: set[str] = set()
    for file in tree.files:
        source = file.read_text(encoding="utf-8")
        if not any(words in source for words in PLACED):
            continue
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant | ast.JoinedStr):
                text = ast.unparse(call.args[0])
                found.update(f"{file.name}:{call.lineno} {words}" for words in PLACED if words in text)
    return [{"name": name} for name in sorted(found)]
