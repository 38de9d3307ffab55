"""Helpers for text that is not vLLM's own: quoting a line, taking kernel stamps off, asking whose process it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from plimsoll.domain.finding import Evidence
from plimsoll.domain.log import Line, Log

MOST_QUOTED = 6  # lines of evidence for one finding: enough to check, short enough to read
LONGEST_QUOTE = 400

# Stamps that a kernel line may still carry, in any order and number: <6>, [12345.678901], [Sat Nov 15 08:00:00 2026], kernel:
_STAMPS = (
    r"(?:\s{0,8}(?:<\d{1,3}>|\[[ \d]{1,12}\.\d{3,9}\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]{2} [\d:]{8} \d{4}\]|kernel:)){1,4}\s?"
)

_VLLM = ("vllm", "ray::", "pt_main_thread")
_PYTHON = ("python", "uvicorn", "api_server", "enginecore", "multiproc")
_COMPILERS = frozenset(
    "cicc nvcc ptxas ninja cc1plus cc1 c++ g++ gcc clang clang++ lto1 ld ld.lld ld.gold cudafe++ fatbinary nvlink rustc".split()
)


def kernel_text(text: str) -> str:
    """The message of a kernel line, without the stamps in front of it."""
    if text[:1] in ("[", "<", "k", " "):
        stamps = re.match(_STAMPS, text)
        if stamps:
            return text[stamps.end() :]
    return text


def quote(log: Log, lines: Iterable[Line]) -> tuple[Evidence, ...]:
    """Lines as evidence: in the order of the file, each once, not too many and not too long."""
    seen: dict[tuple[int | None, str], Evidence] = {}
    for line in lines:
        text = " ".join(line.text.split())
        text = text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
        seen.setdefault((line.number, text), Evidence(log.source, text, line.number))
        if len(seen) >= MOST_QUOTED:
            break
    return tuple(seen.values())


def whose(name: str) -> str:
    """Whose process bears this name: "vllm" for sure, "python" (most likely the server), "compiler", or "other"."""
    name = name.strip().lower()
    if name.startswith(_VLLM):
        return "vllm"
    if name in _COMPILERS:
        return "compiler"
    return "python" if name.startswith(_PYTHON) else "other"
