"""Which of the log lines we know are in one release of vLLM."""

from __future__ import annotations

import re
from typing import Any

from lab.catalogue.log_lines import LOG_LINES
from lab.catalogue.source_tree import SourceTree

# "one " "two" and f"one " f"two" over several source lines are one message.
_JOIN = re.compile(r"""(["'])\s*\n\s*[frbFRB]{0,2}(["'])""")


def joined(source: str) -> str:
    """A source text in which a message that is written over several lines stands as one."""
    return _JOIN.sub("", source)


def read_log_lines(tree: SourceTree) -> list[dict[str, Any]]:
    """The names of our patterns whose fragment of text stands in the release's source."""
    vllms_own = [line for line in LOG_LINES if line.fragment is not None]
    missing = {line.name: line.fragment for line in vllms_own if line.fragment}
    found: list[dict[str, Any]] = []
    for file in tree.files:
        text = joined(file.read_text(encoding="utf-8"))
        for name in [n for n, fragment in missing.items() if fragment in text]:
            found.append({"name": name})
            del missing[name]
        if not missing:
            break
    return sorted(found, key=lambda row: str(row["name"]))
