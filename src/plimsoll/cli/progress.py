"""A bar on the terminal while something takes long; nothing where standard error is a file or a pipe."""

from __future__ import annotations

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
    is_drawn = False

    def draw(done: int, total: int) -> None:
        nonlocal is_drawn
        taken = time.monotonic() - begin
        if taken < AFTER_S or not sys.stderr.isatty():
            return
        share = done / total if total else 1.0
        left = f", {taken / share - taken:.0f} s left" if 0 < share < 1 else ""
        filled = round(share * WIDTH)
        text = f"\r{doing} [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {total:,} {of}{left}"
        print(text.ljust(100), end="", file=sys.stderr, flush=True)
        is_drawn = True

    try:
        yield draw
    finally:
        if is_drawn:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)
