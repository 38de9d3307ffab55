"""Secrets told over several lines, each of which carries a prefix of its own: a stamp, a pod's name, docker's JSON.

`redact` knows them by the lines above, so it must see these lines without what stands in front of them.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from plimsoll.domain.redaction import REDACTED, redact

REACH = 8  # lines above that may name what this one holds
FURTHEST = 500  # characters of a line above that are looked at
MOST_KEY_LINES = 120
LONGEST = 16 << 10  # of a line that is looked at
_HINTS = ("key", "token", "secret", "pass", "pwd", "credential", "auth", "cookie", "sig")


class _Wrapped(NamedTuple):
    head: str
    bare: str
    tail: str
    is_json: bool = False

    def holding(self, text: str) -> str:
        """The line with another text inside."""
        return self.head + (json.dumps(text)[1:-1] if self.is_json else text) + self.tail


@cache
def _json() -> re.Pattern[str]:
    return re.compile(
        r'(\{[^\n]{0,4000}?"(?:log|MESSAGE|message|msg|text|textPayload|body)"\s{0,4}:\s{0,4}")((?:[^"\\]|\\.){0,16000})("[^\n]*\n?)'
    )


@cache
def _prefix() -> re.Pattern[str]:
    return re.compile(
        r"(?:\x1b\[[0-9;]{0,16}m|<\d{1,3}>|\[\d{4}-\d\d-\d\d[T ][\d:.,Z+\-]{8,24}\] ?|\d\d:\d\d:\d\d\S{0,8} "
        r"|\[pod/[^\]\s]{1,200}\] ?"
        r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,20}(?: (?:stdout|stderr) [FP])? "
        r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [^\s:]{1,80}: ?"
        r"|[A-Za-z0-9][\w.\-]{0,80} {0,40}\| ?"
        r"|\([A-Za-z][^()\n]{0,80}pid=\d{1,10}[^()\n]{0,60}\) ?"
        r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\s]{1,200}\] ?){1,8}"
    )


def hide_wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with what the lines above give away as secret hidden inside their wrapping."""
    above: deque[str] = deque(maxlen=REACH)
    key_lines = 0  # how many more may belong to a private key that was begun
    for line in lines:
        one = _apart(line) if len(line) <= LONGEST else _Wrapped("", line, "")
        shown = one.bare
        if one.head and key_lines:
            shown = REDACTED
        elif one.head and above and any(hint in text.lower() for text in above for hint in _HINTS):
            shown = _below(above, one.bare)
        if "PRIVATE KEY" in one.bare:
            key_lines = MOST_KEY_LINES if "BEGIN" in one.bare else 0
        key_lines = max(0, key_lines - 1)
        yield line if shown == one.bare else one.holding(shown)
        above.append(one.bare[:FURTHEST])


def _below(above: Iterable[str], bare: str) -> str:
    """What may be shown of a line, seen together with those above it."""
    text = "\n".join([*above, bare])
    if text.count("[") > text.count("]") and len(bare.strip()) > 3 and bare.strip() not in redact(text + "\n]"):
        return REDACTED  # an item of a list that is closed further down
    hidden = redact(text)
    last = hidden.rpartition("\n")[2]
    if last.endswith(bare):
        return bare
    # A list or a block becomes one word: then the line is not there any more.
    return last if hidden.count("\n") == sum(1 for _ in above) else bare if bare.strip() in hidden else REDACTED


def _apart(line: str) -> _Wrapped:
    if line.startswith("{") and (match := _json().match(line)) is not None:
        try:
            inner = json.loads(f'"{match[2]}"')
        except ValueError:
            return _Wrapped("", line, "")
        bare = str(inner).removesuffix("\n")
        end = "\\n" if str(inner).endswith("\n") else ""
        return _Wrapped(match[1], bare, end + match[3], is_json=True)
    match = _prefix().match(line)
    at = match.end() if match is not None else 0
    text = line[at:].rstrip("\r\n")
    return _Wrapped(line[:at], text, line[at + len(text) :])
