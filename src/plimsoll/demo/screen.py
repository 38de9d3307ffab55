"""The demo's output: headings, events, and what guard saw, decided and did, by its output and journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from plimsoll.demo.fleet import Guard
from plimsoll.guard.act.journal_entry import CLOSED, OPENED, OUTCOME, Entry
from plimsoll.guard.daemon.journal import read_journal
from plimsoll.render import terminal
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, Report

# Turns guard's output and journal into lines for a reader: what it saw, decided and did. Nothing is added.

SAW, DECIDED, DID, ENDED = "saw", "decided", "did", "ended"
QUIET = ("lock", "unlock", "hold", "gone")  # steps left out for the reader; the journal has them
STEPS = {
    "evidence": "kept evidence", "leave": "took it out", "drain": "took it out", "idle": "waited", "stop": "stopped it",
    "start": "started it", "ready": "saw it ready", "check": "checked it", "warm": "warmed it up", "undrain": "put it back",
    "probation": "watched it", "shed": "sheds", "unshed": "ended that", "compact": "compacted", "verify": "verified",
}  # fmt: skip
ENDS = {"done": "done and confirmed", "undone": "taken back", "stood-back": "left to another guard", "failed": "did not help",
        "held": "held: a person is needed"}  # fmt: skip


class StoryLine(NamedTuple):
    """One line: its time, one of guard's four kinds of word, the engine, and the text."""

    at: float  # seconds since 1970
    how: str
    engine: str
    text: str


def of_change(told: Mapping[str, Any]) -> StoryLine | None:
    """Reads a line that guard printed: a condition that begins or is over. The journal has guard's actions."""
    engine, what, at = str(told.get("engine") or ""), told.get("what"), told.get("at")
    text = str(told.get("sentence") or "").removeprefix(f"{engine}: ")
    if what not in ("begins", "over", "needs-a-person"):
        return None
    if what == "begins":
        name, found, because = text.partition(f" ({told.get('code')}): ")
        text = f"{because} ({told.get('code')})" if found else name
    at_s = float(at) if isinstance(at, int | float) else 0.0
    return StoryLine(at_s, ENDED if what == "needs-a-person" else SAW, engine, text)


def of_entry(entry: Entry) -> StoryLine | None:
    """Reads an entry of its journal; None for one that is left out for the reader."""
    fields = entry.fields
    if entry.kind == OPENED:
        return StoryLine(entry.at, DECIDED, entry.engine, f"to {fields.get('grade', 'act')}")
    if entry.kind == OUTCOME:
        if entry.step in QUIET and fields.get("done"):
            return None
        word = STEPS.get(entry.step, entry.step)
        failed = "" if fields.get("done") else " (not done)"
        again = {"stop": "stopped: ", "start": "started: "}.get(entry.step, "")  # a word that only repeats the step
        return StoryLine(entry.at, DID, entry.engine, f"{word}{failed}: {str(fields.get('says', '')).removeprefix(again)}")
    if entry.kind == CLOSED:
        end = str(fields.get("end", "unknown"))
        return StoryLine(entry.at, ENDED, entry.engine, f"{fields.get('grade', 'it')}: {ENDS.get(end, end)}")
    return None


_LEAD = {SAW: "guard saw", DECIDED: "decided", DID: "did", ENDED: "ended"}


class Screen:
    """Prints through `show`; `began` is when its clock starts, in seconds since 1970."""

    def __init__(self, show: Callable[[Report], None], began: float) -> None:
        self.show, self.began = show, began

    def head(self, text: str) -> None:
        self.show(Report(["", terminal.Line(text, 2, BOLD)]))

    def happens(self, text: str) -> None:
        self.show(Report([terminal.Line(f"  {self._clock(time.time())}  {text}", 11)]))

    def guard(self, line: StoryLine) -> None:
        said = f"  {self._clock(line.at)}  {_LEAD[line.how]:>9}  {line.engine}  {line.text}"
        self.show(Report([terminal.Line(said, 25, BAD if line.how == ENDED and "done" not in line.text else NAME)]))

    def plain(self, lines: Iterable[str], indent: str = "  ") -> None:
        self.show(Report(terminal.Whole(f"{indent}{line}") for line in lines))

    def command(self, words: str) -> None:
        self.show(Report([terminal.Whole(f"  $ {words}", FAINT)]))

    def verdict(self, text: str, *, is_good: bool) -> None:
        self.show(Report([terminal.Line(f"  {text}", 4, GOOD if is_good else BAD)]))

    def _clock(self, at: float) -> str:
        return f"{max(0.0, at - self.began):5.1f} s"


LOOK_S = 0.2


class Watch:
    """Follows one guard; `say` gets every line for the reader."""

    def __init__(self, guard: Guard, say: Callable[[StoryLine], None]) -> None:
        self.entries: list[Entry] = []
        self._guard, self._say = guard, say
        self._read = 0

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Reports what is new in guard's output and journal."""
        data = b""
        with contextlib.suppress(OSError), self._guard.said.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = [of_change(json.loads(line)) for line in whole.splitlines() if line.startswith(b"{")]
        if self._guard.journal.exists():
            new = [one for one in read_journal(self._guard.journal).entries if one.number > self.last]
            self.entries += new
            lines += map(of_entry, new)
        for line in sorted((line for line in lines if line is not None), key=lambda line: line.at):
            self._say(line)

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Waits until `holds` is true; True if that came in time."""
        end_s = asyncio.get_running_loop().time() + within_s
        while True:
            self.look()
            if holds():
                return True
            if asyncio.get_running_loop().time() >= end_s or not self._guard.is_running:
                return False
            await asyncio.sleep(LOOK_S)

    def ends(self, grade: str, engine: str = "", since: int = 0) -> list[str]:
        """Returns how actions of this kind ended, after the entry of that number."""
        mine = [one for one in self.entries if one.kind == CLOSED and one.number > since and one.fields.get("grade") == grade]
        return [str(one.fields.get("end")) for one in mine if not engine or one.engine == engine]

    def did(self, step: str, engine: str = "", since: int = 0) -> Entry | None:
        """Returns the last entry of this step done; None if there is none."""
        mine = [one for one in self.entries if one.number > since and one.kind == OUTCOME and one.step == step]
        done = [one for one in mine if one.fields.get("done") and (not engine or one.engine == engine)]
        return done[-1] if done else None

    @property
    def last(self) -> int:
        return self.entries[-1].number if self.entries else 0
