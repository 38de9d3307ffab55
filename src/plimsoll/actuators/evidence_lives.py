"""Where the last life of an engine begins in its log: what earlier ones said would be taken for what happened to this one.

A log is cut only after all that is secret in it was hidden: a line in a user's text may look like a beginning.
"""

from __future__ import annotations

import re
from pathlib import Path

from plimsoll.actuators.own_process_log import NEW_LIFE

LOOK_BACK_BYTES = 64 << 20
PREAMBLE_BYTES = 16 << 10
BLOCK_BYTES = 1 << 20
_OVERLAP_BYTES = 4 << 10
_MARK = re.compile(rb"(?m)^" + re.escape(NEW_LIFE.strip()) + rb"\r?$")
_BANNER = re.compile(
    "(?m)^[^\n]*(?:[█▀▄] {1,4}version |vLLM API server version |vLLM server version )[^\n]*$".encode()
)  # by which vLLM introduces itself
_LEFT_OUT = re.compile(rb"(?m)^\[plimsoll left out about [0-9,]+ bytes here\]$")


def last_life(shown: bytes, path: str, head_bytes: int, tail_bytes: int) -> int:
    """Where it begins in what is shown of the log at `path`: its first and last bytes, a line between them; 0: all of it."""
    marks = [found.start() for found in _MARK.finditer(shown)] or [found.start() for found in _BANNER.finditer(shown)]
    begins = marks[-1] if marks else 0
    gap = max((found.start() for found in _LEFT_OUT.finditer(shown)), default=0)
    if gap > begins and _begins_between(Path(path), head_bytes, tail_bytes):
        return gap
    # What little stands before a lone introduction is how that life was started.
    return begins if len(marks) > 1 or begins > PREAMBLE_BYTES or _MARK.match(shown, begins) else 0


def _begins_between(path: Path, head_bytes: int, tail_bytes: int) -> bool:
    """Whether one begins in the part that is not shown, as far back as is worth looking."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2) - tail_bytes
            at = max(head_bytes, end - LOOK_BACK_BYTES)
            while at < end:
                file.seek(at)
                block = file.read(min(BLOCK_BYTES, end - at) + _OVERLAP_BYTES)
                if not block:
                    return False
                if _MARK.search(block) or _BANNER.search(block):
                    return True
                at += BLOCK_BYTES
    except OSError:
        return False
    return False
