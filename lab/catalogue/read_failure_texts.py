"""Which of the failures' words that we say are vLLM's stand in one release of vLLM."""

from __future__ import annotations

from typing import Any

from lab.catalogue.read_log_lines import joined
from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm.failure_texts import TEXTS


def read_failure_texts(tree: SourceTree) -> list[dict[str, Any]]:
    """The names of our texts whose fragment stands in the release's source."""
    missing = {text.name: (text.needle if text.fragment is None else text.fragment) for text in TEXTS if text.speaker == "vllm"}
    found: list[str] = []
    for file in tree.files:
        source = joined(file.read_text(encoding="utf-8"))
        here = [name for name, fragment in missing.items() if fragment in source]
        found += here
        for name in here:
            del missing[name]
        if not missing:
            break
    return [{"name": name} for name in sorted(found)]
