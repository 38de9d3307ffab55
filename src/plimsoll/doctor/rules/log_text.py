"""Lines of text with their process and time, free of any wrapping; and which programs wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from plimsoll.doctor.words import words
from plimsoll.findings import Evidence, Finding

Facts = TypeVar("Facts")


class LogLine(NamedTuple):
    """One line as the program said it: colours, container wrapping and vLLM's own prefix are taken off `text`."""

    number: int | None  # counted from 1 in the file as it lies there; None where it cannot be known
    process: str  # "EngineCore_DP0 pid=123", "Worker_TP1 pid=7", "VllmWorker rank=0 pid=1"; "" where nobody is named
    level: str  # DEBUG, INFO, WARNING, ERROR, CRITICAL; "" where the line does not say
    at: float | None  # seconds; comparable within one file only (vLLM prints no year)
    text: str  # at most `LONGEST` characters; indentation after the prefix is kept
    place: str = ""  # "core.py:845" of vLLM's own prefix
    server: str = ""  # the container, pod or unit the line came from, where the wrapping names one


class Log(NamedTuple):
    """One text input: a server's log, kernel lines, the output of a tool, or several of them in one file."""

    source: str  # as the user named it
    lines: Sequence[LogLine]
    skipped: tuple[tuple[int, int], ...] = ()  # (index into lines, lines left out before it): a huge file's uneventful middle
    size_bytes: int | None = None


class TextVerdict(NamedTuple, Generic[Facts]):
    """The verdict on one kind of text: findings, the gravest first, and the facts that were read."""

    findings: list[Finding]
    facts: Facts


WRAPPED_SHARE = 0.2  # of the lines: fewer records of another shape than that are another program's, no wrapping
LONGEST = 16 << 10  # characters of one line that are kept: a dumped configuration is long, a progress bar endless


WRITTEN_BY: dict[str, list[str]] = words("names")["written_by"]  # words that occur in text of other programs
KINDS = {
    "kernel": ("oom_killer", "kernel"), "supervisor": ("pod", "pod_event", "pod_row", "docker", "systemd"),
    "nvidia-smi": ("smi", "smi_error"),
}  # fmt: skip


MOST_QUOTED = 6  # lines of evidence for one finding: enough to check, short enough to read
LONGEST_QUOTE = 400

# Stamps that a kernel line may still carry, in any order and number: <6>, [12345.678901], kernel:, and that of `dmesg -T`,
# [Sat Nov 15 08:00:00 2026], with day and month in the language of whoever asked.
_STAMPS = r"(?:\s{0,8}(?:<\d{1,3}>|\[[ \d]{1,12}\.\d{1,9}\]|\[[^\[\]]{4,24} \d\d:\d\d:\d\d \d{4}\]|kernel:)){1,4}\s?"

_OWNERS = {owner: tuple(some) for owner, some in words("names")["owners"].items()}


# What a record of the kernel, or of a daemon that kills for want of memory, begins with. Inside a sentence the same words are
# a quotation: somebody asks about them.
_KERNEL_BEGINS = re.compile(
    r"NVRM: |nvidia[\w-]{0,20}[ :]|(?:traps: )?\S{1,40}\[\d{1,10}\]:? |(?:INFO: )?task \S|amdgpu|\[drm|pcieport |"
    r"\{\d{1,6}\}|mce: |"
    r"Memory (?:failure|cgroup)|EDAC |blk_|Buffer |critical |nvme|I/O error|print_req|(?:EXT4|XFS|BTRFS)|Out of memory|oom[-_]|"
    r"Kill(?:ed)? |Marked |Task in |memory: usage|\d{1,15} pages RAM|\S{1,40} invoked oom-killer|\[[ \d]{1,12}\]|sending SIG|"
    r"low memory|[\w:.-]{1,40} [\da-f:.]{7,20}: |[\da-f]{4}:[\da-f]{2}:"
)


def kernel_message(line: LogLine) -> str | None:
    """The kernel's message in this line; None where another program writes it, or quotes one."""
    stamps = re.match(_STAMPS, line.text) if line.text[:1] in ("[", "<", "k", " ") else None
    text = line.text[stamps.end() :] if stamps else line.text
    return text if not line.process and _KERNEL_BEGINS.match(text.lstrip()) else None


def quote(log: Log, lines: Iterable[LogLine]) -> tuple[Evidence, ...]:
    """Lines as evidence: in the order of the file, each once, not too many and not too long."""
    seen: dict[tuple[int | None, str], Evidence] = {}
    for line in lines:
        text = " ".join(line.text.split())
        text = text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
        seen.setdefault((line.number, text), Evidence(log.source, text, line.number))
        if len(seen) >= MOST_QUOTED:
            break
    return tuple(seen.values())


def process_owner(name: str) -> str:
    """Whose process bears this name: "vllm" for sure, "python" (most likely the server), "compiler", or "other"."""
    name = name.strip().lower()
    if name.startswith(_OWNERS["vllm"]):
        return "vllm"
    if name in _OWNERS["compilers"]:
        return "compiler"
    return "python" if name.startswith(_OWNERS["python"]) else "other"
