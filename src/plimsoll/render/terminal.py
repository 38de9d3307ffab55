"""The one way a command prints its answer."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plimsoll.errors import WorldFailed


def show(text: str) -> None:
    """Print to standard output; a disk that is full is the world's fault, a reader that went away is nobody's."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WorldFailed(f"cannot write the answer: {error.strerror or error}") from None


def write_file(path: str, text: str) -> None:
    """Write a report to a file the user named; a plain file is replaced only once the new one is whole."""
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


# A bar on the terminal while something takes long; nothing where standard error is a file or a pipe.

WIDTH = 30
AFTER_S = 0.4
"""What takes less shows nothing: a bar that flashes helps nobody."""


@contextmanager
def bar(doing: str, of: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how much is done and how much there is."""
    begin = time.monotonic()
    first: tuple[float, int] | None = None
    is_drawn = False
    width = min(100, shutil.get_terminal_size().columns - 1)

    def draw(done: int, total: int) -> None:
        nonlocal first, is_drawn
        now = time.monotonic()
        # What came before the first call was set-up, and says nothing about the rest.
        first = first or (now, done)
        if now - begin < AFTER_S or not sys.stderr.isatty():
            return
        share = done / total if total else 1.0
        rate = (done - first[1]) / (now - first[0]) if now > first[0] else 0.0
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
        filled = round(share * WIDTH)
        text = f"\r{doing} [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {total:,} {of}{left}"
        print(text[: width + 1].ljust(width + 1), end="", file=sys.stderr, flush=True)
        is_drawn = True

    try:
        yield draw
    finally:
        if is_drawn:
            print("\r" + " " * width + "\r", end="", file=sys.stderr, flush=True)


# Lines that fit a screen.

WRAPPING_WIDTH = 110


def wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most WRAPPING_WIDTH, broken at blanks; a word longer than that keeps its line."""
    lines: list[str] = []
    current = ""
    for blank, word in re.findall(r"(\s*)(\S+)", text):
        if current.strip() and len(current) + len(blank) + len(word) > WRAPPING_WIDTH:
            lines.append(current)
            current = indent + word
        else:
            current += blank + word
    return [*lines, current]
