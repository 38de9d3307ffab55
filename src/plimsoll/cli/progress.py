"""A bar on the terminal while something takes long; nothing where standard error is a file or a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
