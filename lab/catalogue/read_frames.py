"""Which of the functions that tell a failed step are defined in one release of vLLM."""

from __future__ import annotations

import re
from typing import Any

from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm.failure_texts import STEP_FRAMES

_DEFINES = re.compile(r"^[ \t]*(?:async )?def (\w+)\(", re.MULTILINE)


def read_frames(tree: SourceTree) -> list[dict[str, Any]]:
    """The names of our functions that some file of the release defines."""
    wanted = {function for _, functions in STEP_FRAMES for function in functions}
    found: set[str] = set()
    for file in tree.files:
        found.update(wanted.intersection(_DEFINES.findall(file.read_text(encoding="utf-8"))))
    return [{"name": name} for name in sorted(found)]
