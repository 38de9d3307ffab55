"""A page of the docs as a script: its commands, what it says they print, and whether that is what they printed.

Commands are what stands behind `$ ` in a block fenced as `console`; a backslash at a line's end and a here-document carry one
over several lines. What follows is what it prints, to the letter. `[...]` stands for what was cut out: whole lines, and where
words are compared also words. What cannot be the same twice is said above the block, where a reader does not see it:

    <!-- run: exit 1 -->                                     its commands end so; unless said, 0
    <!-- run: numbers within 20 % -->                        compared word by word, so that lines may break elsewhere
    <!-- run: numbers differ -->                             any number will do; dates and clocks always do
    <!-- run: numbers differ in "replay took" -->            only in the lines with that text; all others to the letter
    <!-- run: exit 1, numbers differ, within 60 s -->        several; the last is how long a command may take

Once on a page, what a reader has and we have otherwise:

    <!-- the page: home /home/you, checkout /home/you/plimsoll, ports 8000 9790 -->
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

CUT = "[...]"
LIMIT_S = 60.0
ANY = math.inf

_FENCE = re.compile(r"^```(\w*)\s*$")
_ABOVE = re.compile(r"<!-- run: (.*?) -->")
_PAGE = re.compile(r"<!-- the page: (.*?) -->")
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
# A version or an address is a name; what else has digits is a number.
_NAME = r"\d+(?:\.\d+){2,}"
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_PIECE = re.compile(rf"{_NAME}|{_NUMBER}")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:\.\d+)?")


class PageError(Exception):
    """The page itself cannot be read as a script; the message begins with the line."""


class Rule(NamedTuple):
    """By how much numbers may differ, as a ratio, in the lines with this text."""

    ratio: float
    within: str = ""


class Above(NamedTuple):
    """What stands above a block."""

    exit_code: int = 0
    rules: tuple[Rule, ...] = ()
    limit_s: float = LIMIT_S

    @property
    def by_words(self) -> bool:
        """Whether lines may break elsewhere."""
        return any(not rule.within for rule in self.rules)

    def ratio(self, line: str) -> float:
        """For the numbers of this line."""
        return next((rule.ratio for rule in self.rules if rule.within in line), 0.0)


class Command(NamedTuple):
    """One command of the page; lines count from 1."""

    line: int
    text: str
    shown: tuple[str, ...]
    shown_line: int
    above: Above

    @property
    def bare(self) -> str:
        """Without a remark at its end."""
        return re.sub(r"\s+# .*$", "", self.text)


class Told(NamedTuple):
    """What a reader has and we have otherwise: his home, his checkout of this repository, his ports."""

    home: str = ""
    checkout: str = ""
    ports: tuple[int, ...] = ()


class Piece(NamedTuple):
    """A line or a word that is shown, with the line of the page and by how much its numbers may differ."""

    text: str
    line: int
    ratio: float


def commands_of(text: str) -> list[Command]:
    """Every command of every console block, in order."""
    lines = text.splitlines()
    found: list[Command] = []
    above, language, begin = Above(), None, 0
    for index, line in enumerate(lines):
        fence = _FENCE.match(line)
        if language is None:
            if fence:
                language, begin = fence[1], index + 1
            elif said := _ABOVE.search(line):
                above = _above(said[1], index + 1)
            elif line.strip():
                above = Above()
        elif fence:
            if language == "console":
                found += _of_block(lines, begin, index, above)
            language, above = None, Above()
    return found


def told_of(text: str) -> Told:
    """What the page says of the reader's machine."""
    said = _PAGE.search(text)
    told = Told()
    for item in said[1].split(",") if said else ():
        name, _, value = item.strip().partition(" ")
        if name == "ports":
            told = told._replace(ports=tuple(int(word) for word in value.split()))
        elif name == "home":
            told = told._replace(home=value)
        elif name == "checkout":
            told = told._replace(checkout=value)
        else:
            raise PageError(f"{_line_of(text, said)}: {name!r} is nothing a page can say")
    return told


def _line_of(text: str, found: re.Match[str] | None) -> int:
    return text.count("\n", 0, found.start() if found else 0) + 1


def _above(said: str, line: int) -> Above:
    above = Above()
    for item in (part.strip() for part in said.split(",")):
        if match := re.fullmatch(r"exit (\d+)", item):
            above = above._replace(exit_code=int(match[1]))
        elif match := re.fullmatch(r"within (\d+) s", item):
            above = above._replace(limit_s=float(match[1]))
        elif match := re.fullmatch(r'numbers (?:differ|within (\d+) %)(?: in "([^"]+)")?', item):
            rule = Rule(ANY if match[1] is None else int(match[1]) / 100, match[2] or "")
            above = above._replace(rules=(*above.rules, rule))
        else:
            raise PageError(f"{line}: {item!r} is nothing that can be said above a block")
    return above


def _of_block(lines: Sequence[str], begin: int, end: int, above: Above) -> list[Command]:
    found: list[Command] = []
    at = begin
    while at < end:
        if not lines[at].startswith("$ "):
            raise PageError(f"{at + 1}: a console block begins with a command, behind `$ `")
        first, text = at, lines[at][2:]
        at += 1
        while at < end and _goes_on(text):
            text += "\n" + lines[at]
            at += 1
        shown = at
        while at < end and not lines[at].startswith("$ "):
            at += 1
        found.append(Command(first + 1, text, tuple(lines[shown:at]), shown + 1, above))
    return found


def _goes_on(text: str) -> bool:
    """Whether a shell would wait for more."""
    first, _, rest = text.partition("\n")
    here = _HERE.search(first)
    if here and here[2] not in rest.split("\n"):
        return True
    return text.endswith("\\")


def wrong(command: Command, printed: str) -> tuple[int, str] | None:
    """The first line of the page that is not what was printed, with a sentence; None if all of it is."""
    found = _found(command, printed)
    return None if isinstance(found, list) else found


def renewed(command: Command, printed: str) -> str:
    """What is shown with the numbers of this run, cut where it is cut; all that was printed, if something else was shown."""
    found = _found(command, printed)
    if not isinstance(found, list):
        return printed
    lines = list(command.shown)
    words: dict[int, list[str]] = {}
    for piece, real in found:
        words.setdefault(piece.line - command.shown_line, []).append(real)
    whole = {" ".join(line.split()): line for line in printed.splitlines()}
    for number, real_words in words.items():
        if command.above.by_words:
            old = iter(real_words)
            again = "".join(part if part.isspace() or part == CUT else next(old) for part in _parts(lines[number]))
            lines[number] = again if CUT in again else whole.get(" ".join(real_words), again)
        else:
            lines[number] = real_words[0]
    return "".join(f"{line}\n" for line in lines)


def _parts(line: str) -> list[str]:
    """Its words, its cuts and the blanks between them."""
    return re.findall(rf"\s+|{re.escape(CUT)}|(?:(?!{re.escape(CUT)})\S)+", line)


def _found(command: Command, printed: str) -> list[tuple[Piece, str]] | tuple[int, str]:
    """Everything that is shown with what was printed for it; or the first line that is not so, with a sentence."""
    real = printed.split() if command.above.by_words else printed.splitlines()
    at = 0
    pairs: list[tuple[Piece, str]] = []
    for number, segment in enumerate(segments := _segments(_pieces(command))):
        starts = range(len(real) + 1)
        if number == 0:
            starts = range(1)
        elif number == len(segments) - 1 and segment:
            starts = range(max(0, len(real) - len(segment)), len(real) + 1)
        best = 0
        for start in (one for one in starts if one >= at):
            fits = _fits(segment, real[start:])
            if fits == len(segment):
                pairs += zip(segment, real[start:], strict=False)
                at = start + fits
                break
            best = max(best, fits)
        else:
            return _said(segment[best], real, at + best if number == 0 else None)
    if len(segments) == 1 and at < len(real):
        return command.shown_line + len(command.shown) - 1, f"more was printed than is shown: {_cut(real[at])}"
    return pairs


def _pieces(command: Command) -> list[Piece]:
    made: list[Piece] = []
    for number, line in enumerate(command.shown):
        ratio = command.above.ratio(line)
        texts = (
            line.replace(CUT, f" {CUT} ").split() if command.above.by_words else [line.strip() if line.strip() == CUT else line]
        )
        made += [Piece(text, command.shown_line + number, ratio) for text in texts]
    return made


def _segments(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """What stands between the cuts; an empty one at an end means that anything may stand there."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece.text == CUT:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


def _fits(segment: Sequence[Piece], real: Sequence[str]) -> int:
    """How many pieces, from the first on, are as printed."""
    for number, piece in enumerate(segment):
        if number == len(real) or not same(piece.text, real[number], piece.ratio):
            return number
    return len(segment)


def _said(piece: Piece, real: Sequence[str], at: int | None) -> tuple[int, str]:
    if at is None:
        return piece.line, f"not printed: {_cut(piece.text)}"
    printed = f"printed was {_cut(real[at])}" if at < len(real) else "nothing more was printed"
    return piece.line, f"shown is {_cut(piece.text)}, {printed}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= 160 else text[:160] + "...")


def same(shown: str, real: str, ratio: float) -> bool:
    """Whether two lines or words are the same but for numbers, which may differ by this ratio."""
    if not ratio:
        return shown == real
    ours, theirs = (" ".join(_MOMENT.sub("<moment>", text).split()) for text in (shown, real))
    if _PIECE.sub("0", ours) != _PIECE.sub("0", theirs):
        return False
    return all(_near(a, b, ratio) for a, b in zip(_PIECE.findall(ours), _PIECE.findall(theirs), strict=True))


def _near(shown: str, real: str, ratio: float) -> bool:
    if shown == real:
        return True
    if re.fullmatch(_NAME, shown) or re.fullmatch(_NAME, real):
        return False
    a, b = (float(text.replace(",", "")) for text in (shown, real))
    return abs(a - b) <= ratio * max(a, b)


def rewritten(text: str, printed: Mapping[int, str]) -> str:
    """The page with what was printed in the place of what is shown, for the commands of these lines."""
    lines = text.splitlines()
    for command in reversed(commands_of(text)):
        if command.line in printed:
            begin = command.shown_line - 1
            lines[begin : begin + len(command.shown)] = printed[command.line].splitlines()
    return "\n".join(lines) + "\n"


def swapper(pairs: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    """Puts the second of each pair in the place of the first, where it stands as a whole word or path."""
    wanted = {one: other for one, other in pairs if one}
    if not wanted:
        return lambda text: text
    longest_first = "|".join(re.escape(one) for one in sorted(wanted, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.]){'(?:' + longest_first + ')'}(?![\w])")
    return lambda text: pattern.sub(lambda match: wanted[match[0]], text)
