"""Makes a server's log short enough to keep: dumps lose their middle, progress bars their steps, this machine its names."""

from __future__ import annotations

import re

LONGEST_LINE = 2000  # an out-of-memory error with several neighbours stays whole
HEAD, TAIL = 1200, 300
SAME_REQUEST_LINES = 3
_ACCESS = re.compile(r'INFO:\s+\S+ - "(GET|POST) (\S+) HTTP')
_ROUTE = re.compile(r"\[launcher\.py:\d+\] Route: ")
_PLACE = re.compile(r"/[\w.\-]{1,40}(?:/[\w.\-]{1,40}){0,4}/site(?=[/:'\"\s,)]|$)")
_ADDRESS = re.compile(r"(?<=://)(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?=:\d)")


def trim(text: str, host: str = "", places: tuple[tuple[str, str], ...] = ()) -> str:
    """The log without its bulk; every line that names a cause, a figure or a process keeps its words.

    `places` are folders of this machine and what to write instead; `host` is its name.
    """
    kept: list[str] = []
    seen: dict[str, int] = {}
    for raw in text.replace("\r\n", "\n").split("\n"):
        line = _last_of_progress(raw)
        if _ROUTE.search(line):
            continue
        if asked := _ACCESS.search(line):
            seen[asked[2]] = seen.get(asked[2], 0) + 1
            if seen[asked[2]] > SAME_REQUEST_LINES:
                continue
        kept.append(_without_middle(_without_names(line, host, places)))
    return "\n".join(kept)


def _last_of_progress(line: str) -> str:
    """What a terminal would show in the end; the prefix that only the first step carries stays."""
    if "\r" not in line:
        return line
    steps = [step for step in line.split("\r") if step.strip()]
    if not steps:
        return ""
    prefix = re.match(r"\(\w[\w-]{0,40} pid=\d+\) ", steps[0])
    return steps[-1] if prefix is None or steps[-1].startswith("(") else prefix[0] + steps[-1]


def _without_names(line: str, host: str, places: tuple[tuple[str, str], ...]) -> str:
    for folder, instead in places:
        line = line.replace(folder, instead)
    line = _ADDRESS.sub("192.0.2.1", _PLACE.sub("/opt", line))
    return line.replace(host, "host") if len(host) > 3 else line


def _without_middle(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:HEAD]} ... [{len(line) - HEAD - TAIL} characters left out] ... {line[-TAIL:]}"
