"""Hides secrets and users' text in a stream of lines, in bounded memory.

`redact` knows a secret by what stands around it, on other lines too: a private key, a YAML list. A text is therefore cut into
blocks only at a line end where redacting both sides apart gives the same as redacting them together.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from plimsoll.redaction import HIDDEN, REDACTED, hide_homes, hide_user_text, hide_user_text_lines, redact, redact_value

# A secret may span lines that each carry a prefix (a stamp, a pod's name, docker's JSON). `redact` knows it by the lines above,
# so it must see these lines without their prefixes.
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
        return self.head + (json.dumps(text)[1:-1] if self.is_json else text) + self.tail


_JSON_RE = re.compile(
    r'(\{[^\n]{0,4000}?"(?:log|MESSAGE|message|msg|text|textPayload|body)"\s{0,4}:\s{0,4}")((?:[^"\\]|\\.){0,16000})("[^\n]*\n?)'
)
_PREFIX_RE = re.compile(
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
        one = _Wrapped("", line, "")
        if len(line) <= LONGEST and line.startswith("{") and (match := _JSON_RE.match(line)) is not None:
            with suppress(ValueError):
                inner = str(json.loads(f'"{match[2]}"'))
                end = "\\n" if inner.endswith("\n") else ""
                one = _Wrapped(match[1], inner.removesuffix("\n"), end + match[3], is_json=True)
        elif len(line) <= LONGEST:
            match = _PREFIX_RE.match(line)
            at = match.end() if match is not None else 0
            text = line[at:].rstrip("\r\n")
            one = _Wrapped(line[:at], text, line[at + len(text) :])
        shown = one.bare
        if one.head and key_lines:
            shown = REDACTED
        elif one.head and above and any(hint in text.lower() for text in above for hint in _HINTS):
            # The line with secrets hidden, read together with the lines above it.
            together = "\n".join([*above, one.bare])
            is_open = together.count("[") > together.count("]") and len(one.bare.strip()) > 3
            hidden = redact(together)
            last = hidden.rpartition("\n")[2]
            if is_open and one.bare.strip() not in redact(together + "\n]"):
                shown = REDACTED  # an item of a list that is closed further down
            elif not last.endswith(one.bare):
                # A list or a block becomes one word: then the line is not there any more.
                gone = one.bare if one.bare.strip() in hidden else REDACTED
                shown = last if hidden.count("\n") == len(above) else gone
        if "PRIVATE KEY" in one.bare:
            key_lines = MOST_KEY_LINES if "BEGIN" in one.bare else 0
        key_lines = max(0, key_lines - 1)
        yield line if shown == one.bare else one.holding(shown)
        above.append(one.bare[:FURTHEST])


BLOCK_CHARS = 1 << 20
WINDOW_CHARS = 64 << 10  # nothing that redact knows reaches further than this
LONGEST_LINE = 256 << 10
_MOST_BLOCKS = 4  # held together where no cut is found
_MOST_CUTS = 20
_DEEPEST = 16
_USER_KEYS = frozenset(
    "prompt prompts messages content image_url prompt_token_ids token_ids output_token_ids tool_calls".split()
)
_SPACED_RE = re.compile(r"(?:[^\0]\0){4,}")  # UTF-16 in the middle of other text
_CONTROL_RE = re.compile(r"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")


class LineSplitter:
    """The lines of blocks of bytes, each with its end; one that is very long is cut at a space."""

    def __init__(self) -> None:
        self.cut = 0  # lines that were

    def of(self, blocks: Iterable[bytes]) -> Iterator[str]:
        """Every line as text."""
        rest = bytearray()
        for block in blocks:
            *whole, last = block.split(b"\n")
            for line in whole:
                yield self._text(rest + line if rest else line) + "\n"
                rest.clear()
            room = LONGEST_LINE + 1 - len(rest)
            rest += last[: max(0, room)]
        if rest:
            yield self._text(rest)

    def _text(self, line: bytes | bytearray) -> str:
        is_long = len(line) > LONGEST_LINE
        text = bytes(line[:LONGEST_LINE]).decode("utf-8", "replace")
        if is_long:
            self.cut += 1
            text = text[: max(text.rfind(" "), 0)] + " [the rest of this line was left out]"
        if "\0" in text:
            text = _SPACED_RE.sub(lambda found: found[0].replace("\0", ""), text)
        return _CONTROL_RE.sub(" ", text)


def shown_text(
    lines: Iterable[str], *, context: int = 0, is_cut: bool = False, block_chars: int = BLOCK_CHARS
) -> Iterator[str]:
    """These lines with secrets hidden, in blocks; the first `context` of them are only looked at.

    Where the text `is_cut` at its end, the last part is only looked at as well: what it begins nobody could tell.
    Memory is bounded by a few blocks.
    """
    hidden = hide_user_text_lines(hide_wrapped(lines))
    held = _after_context("".join(islice(hidden, context)), hidden) if context else ""
    pieces, size = [held], len(held)
    wanted = block_chars + WINDOW_CHARS
    for line in hidden:
        pieces.append(line)
        size += len(line)
        if size < wanted:
            continue
        text = "".join(pieces)
        cut = _safe_cut(text, len(text) - WINDOW_CHARS)
        if cut is None and size < _MOST_BLOCKS * BLOCK_CHARS:
            pieces, wanted = [text], size + block_chars
            continue
        cut = len(text) if cut is None else cut
        yield hide_homes(redact(text[:cut]))
        pieces, size, wanted = [text[cut:]], len(text) - cut, block_chars + WINDOW_CHARS
    text = "".join(pieces)
    yield hide_homes(redact(text[: _safe_cut(text, len(text) - WINDOW_CHARS) or 0] if is_cut else text))


def _after_context(context: str, lines: Iterator[str]) -> str:
    """The first lines after the context that say nothing of what began in it."""
    following, size = [], 0
    for line in lines:
        following.append(line)
        size += len(line)
        if size >= WINDOW_CHARS:
            break
    text = context[-2 * WINDOW_CHARS :] + "".join(following)
    at = len(text) - size
    step = 1
    for _ in range(_MOST_CUTS):
        if _is_safe(text, at):
            return text[at:]
        for _ in range(step):
            at = text.find("\n", at) + 1 or len(text)
        step *= 2
    return ""


def _safe_cut(text: str, near: int) -> int | None:
    """A line end at or before this place where the text may be cut."""
    step = 1
    at = text.rfind("\n", 0, near) + 1
    for _ in range(_MOST_CUTS):
        if at <= 0:
            return None
        if _is_safe(text, at):
            return at
        for _ in range(step):
            at = text.rfind("\n", 0, max(0, at - 1)) + 1
        step *= 2
    return None


def _is_safe(text: str, at: int) -> bool:
    start = text.rfind("\n", 0, max(0, at - WINDOW_CHARS)) + 1
    before, after = text[start:at], text[at : at + WINDOW_CHARS]
    return redact(before + after) == redact(before) + redact(after)


def shown_line(text: str) -> str:
    """A name or a sentence made safe to show: one line, no secret, no home folder, no control character."""
    one = " ".join(_CONTROL_RE.sub(" ", text.replace("\n", " ").replace("\r", " ")).split())
    return hide_homes(redact(hide_user_text(one)))[:500]


def shown_json(data: bytes) -> str | None:
    """JSON facts with secrets hidden, as JSON; None where it is no JSON."""
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    text = json.dumps(_shown_fact("", facts, _DEEPEST), indent=2, ensure_ascii=False) + "\n"
    return hide_homes(redact(text))  # once more as a text: what is a secret may be known by its neighbours only


def _shown_fact(name: str, fact: object, depth: int) -> object:
    if name in _USER_KEYS and fact and not isinstance(fact, int | float):
        return HIDDEN
    if isinstance(fact, str):
        return hide_homes(redact_value(name, hide_user_text(fact))) if name else shown_long(fact)
    if depth == 0 and isinstance(fact, dict | list):
        return "left out: too deep"
    if isinstance(fact, dict):
        return {shown_long(str(key)): _shown_fact(str(key), value, depth - 1) for key, value in fact.items()}
    if isinstance(fact, list):
        return [_shown_fact(name, value, depth - 1) for value in fact]
    return fact if redact_value(name, str(fact)) == str(fact) else REDACTED


def shown_long(text: str) -> str:
    """A small text with secrets hidden."""
    return hide_homes(redact(hide_user_text(text)))
