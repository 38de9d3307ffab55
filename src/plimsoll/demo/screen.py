"""What the demo prints: headings, what happens, and guard's words with their times; colour only where a terminal wants it."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping

from plimsoll.demo.narration import DECIDED, DID, ENDED, SAW, Line

WIDTH = 112
_CODES = {"head": "1", "guard": "36", "good": "32", "bad": "31", "faint": "2"}
_LEAD = {SAW: "guard saw", DECIDED: "decided", DID: "did", ENDED: "ended"}


class Screen:
    """Prints through `show`; `began` is when its clock starts, in seconds since 1970."""

    def __init__(self, show: Callable[[str], None], *, is_coloured: bool, began: float) -> None:
        self._show, self._is_coloured, self.began = show, is_coloured, began

    def head(self, text: str) -> None:
        """A new part."""
        self._show("")
        self._show(self._painted("head", text))

    def happens(self, text: str) -> None:
        """What the demo itself does."""
        self._wrapped(f"  {self._clock(time.time())}  ", text, "")

    def guard(self, line: Line) -> None:
        """One of guard's words."""
        colour = "bad" if line.how == ENDED and "done" not in line.text else "guard"
        self._wrapped(f"  {self._clock(line.at)}  ", f"{_LEAD[line.how]:>9}  {line.engine}  {line.text}", colour, hang=14)

    def plain(self, lines: Iterable[str], indent: str = "  ") -> None:
        """Text as it is."""
        for line in lines:
            self._show(f"{indent}{line}".rstrip())

    def command(self, words: str) -> None:
        """A command that is run, as one would type it."""
        self._show("  " + self._painted("faint", f"$ {words}"))

    def verdict(self, text: str, *, is_good: bool) -> None:
        """How it ended."""
        self._show("  " + self._painted("good" if is_good else "bad", text))

    def _clock(self, at: float) -> str:
        return f"{max(0.0, at - self.began):5.1f} s"

    def _wrapped(self, lead: str, text: str, colour: str, hang: int = 0) -> None:
        rows = textwrap.wrap(text, WIDTH - len(lead), subsequent_indent=" " * hang) or [""]
        for number, row in enumerate(rows):
            self._show((lead if number == 0 else " " * len(lead)) + self._painted(colour, row))

    def _painted(self, name: str, text: str) -> str:
        return f"\x1b[{_CODES[name]}m{text}\x1b[0m" if self._is_coloured and name in _CODES else text


def wants_colour(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to paint: on a terminal that can, unless NO_COLOR says no."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in ("", "dumb")
