"""Prints every command's report: JSON, or lines and tables, drawn by rich in the terminal's width and colours.

Piped, with NO_COLOR or on a dumb terminal it is plain text without escapes. Nothing in a report is markup, and control
sequences are taken out before it is drawn.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from plimsoll.errors import WorldFailed
from plimsoll.redaction import one_line, plain, printable

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 110  # of output that is piped or written to a file
WIDEST = 140  # on a terminal: beyond it a sentence is hard to follow
GOOD, BAD, WARN, NAME, FAINT, BOLD = "green", "bold red", "yellow", "cyan", "dim", "bold"
SEVERITY = {"critical": BAD, "warning": WARN, "info": NAME}
AFTER_S = 0.4  # shorter work shows no progress: a bar that flashes helps nobody


class Line(NamedTuple):
    """A line that is broken at blanks where it is too long; a word longer than the screen has a line of its own."""

    text: str
    hang: int = 2  # where its further lines begin
    style: str = ""
    styled: int | None = None  # the number of its first letters that have the style; None: all


class Whole(NamedTuple):
    """A line that is never broken, to be copied."""

    text: str
    style: str = ""


class Table(NamedTuple):
    """Rows of cells; columns that the screen has no room for go on below."""

    align: str  # a letter a column, the last one for all that follow: l left, r right, w left and broken where it is too long
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    repeated: int = 1  # columns that are repeated at the left of each part
    styles: Sequence[str] = ()  # a style a row


class Report(list["str | Line | Whole | Table"]):
    """A command's output, to be drawn; a bare string is a line."""

    def __str__(self) -> str:
        return drawn(self)


def show(shown: str | Report) -> None:
    """Prints the answer to standard output; a reader that went away does not change the exit code."""
    try:
        tell(shown)
    except BrokenPipeError:
        forget_stdout()


def tell(shown: str | Report, file: TextIO | None = None) -> None:
    """Prints output of a running command: BrokenPipeError once nobody reads; a full disk is WorldFailed."""
    file = file or sys.stdout
    try:
        print(drawn(shown, file) if isinstance(shown, Report) else shown, file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WorldFailed(f"cannot write the answer: {error.strerror or error}") from None


def forget_stdout() -> None:
    """Keeps Python from trying again, at its end, to write output that could not be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def drawn(report: Report, file: TextIO | None = None) -> str:
    """A report as text: in colour where `file` is a terminal that has them."""
    from rich.console import Console

    is_plain = file is None or not file.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
    width = WIDTH if file is None or not file.isatty() else min(Console().width, WIDEST)
    console = Console(force_terminal=not is_plain, no_color=is_plain, width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        for part in report:
            draw_on(console, part)
    return "\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n")


def draw_on(console: Console, part: str | Line | Whole | Table) -> None:
    """Draws one part of a report."""
    from rich.text import Text

    if isinstance(part, Table):
        _draw_table(console, part)
        return
    line = Line(part) if isinstance(part, str) else part
    text = Text(printable(line.text, "?"), end="")
    text.stylize(line.style, 0, line.styled if isinstance(line, Line) else None)
    pieces = [text]
    if isinstance(line, Line) and len(text) > console.width:
        breaks: list[int] = []
        column = 0
        for word in re.finditer(r"\S+", text.plain):
            if word.end() - (breaks[-1] if breaks else 0) + column > console.width and text.plain[: word.start()].strip():
                breaks.append(word.start())
                column = line.hang
        pieces = list(text.divide(breaks))
    for place, piece in enumerate(pieces):
        piece.pad_left(line.hang if place and isinstance(line, Line) else 0)
        console.print(piece, no_wrap=True, overflow="ignore", crop=False)


def _draw_table(console: Console, table: Table) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = [table.head, *table.rows] if table.head else list(table.rows)
    widths = [max(len(row[place]) if place < len(row) else 0 for row in rows) + 2 for place in range(max(map(len, rows)))]
    kept, first = list(range(table.repeated)), table.repeated
    while first < len(widths):
        columns = [*kept, first]
        while columns[-1] + 1 < len(widths) and (
            sum(widths[place] for place in [*columns, columns[-1] + 1]) + 2 <= console.width or table.align[-1] == "w"
        ):
            columns.append(columns[-1] + 1)
        drawn = RichTable(box=None, show_header=bool(table.head), padding=(0, 0, 0, 2), header_style=BOLD)
        for place in columns:
            kind = table.align[min(place, len(table.align) - 1)]
            head = Text(printable(table.head[place], "?")) if place < len(table.head) else ""
            drawn.add_column(head, justify="right" if kind == "r" else "left", no_wrap=kind != "w")
        for number, row in enumerate(table.rows):
            cells = [Text(printable(row[place], "?") if place < len(row) else "") for place in columns]
            drawn.add_row(*cells, style=table.styles[number] if number < len(table.styles) else None)
        if first > table.repeated:
            console.print()
        console.print(drawn, crop=False)
        first = columns[-1] + 1


def picked(value: object, names: str) -> dict[str, Any]:
    """These attributes of a value for a JSON object, each given as NAME or, where the names differ, NAME=ATTRIBUTE."""
    pairs = (name.partition("=") for name in names.split())
    return {name: getattr(value, attribute or name) for name, _, attribute in pairs}


def json_text(body: object) -> str:
    """The JSON that a command prints: its texts are without secrets and each on one line, and no number is infinite."""
    return json.dumps(plain(body, one_line), indent=2, ensure_ascii=False)


def write_file(path: str, text: str) -> None:
    """Writes a report to a file the user named; a plain file is replaced only once the new one is whole."""
    import tempfile
    from pathlib import Path

    target = Path(path)
    try:
        if target.exists() and (target.is_symlink() or not target.is_file()):
            target.write_text(text, encoding="utf-8")  # a device, a pipe or a link is written to, never put aside
            return
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                temporary.chmod(0o644)
                temporary.replace(target)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise WorldFailed(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def bar(doing: str, of: str) -> Iterator[Callable[[int, int], None]]:
    """Shows progress on a terminal during long work: gives a function to call with the amount done and the total."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    begin, console = time.monotonic(), Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
    what, unit = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[of]"))
    columns = (what, BarColumn(30), MofNCompleteColumn(), unit, TimeRemainingColumn(elapsed_when_finished=True))
    progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
    task = progress.add_task(printable(doing), total=None, of=printable(of))

    def draw(done: int, total: int) -> None:
        if time.monotonic() - begin >= AFTER_S:
            progress.start()
            progress.update(task, completed=done, total=total, refresh=True)

    try:
        yield draw
    finally:
        progress.stop()
