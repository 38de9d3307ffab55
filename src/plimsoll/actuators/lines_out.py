"""Lines to standard output from a thread of its own: a reader that stands still never stops the watching."""

from __future__ import annotations

import os
import queue
import threading

MOST_WAITING = 10_000
STANDARD_OUTPUT = 1


class LinesOut:
    """Writes in order; when too many wait, new ones are dropped and counted."""

    def __init__(self, descriptor: int = STANDARD_OUTPUT) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self.dropped = 0
        self.is_gone = False  # whoever read has closed his end
        self._trouble = ""
        self._is_full = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why lines are lost now; empty when they are not."""
        return self._trouble or ("whoever reads it stands still" if self._is_full else "")

    def say(self, line: str) -> None:
        """One line, as soon as it can be written."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            self._is_full = True

    def close(self, seconds: float = 2.0) -> None:
        """Wait for what is left, but not for ever."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            left = (line + "\n").encode(errors="replace")
            try:
                while left:  # not through a buffer of Python's: what a full disk refuses would stay in it
                    left = left[os.write(self._descriptor, left) :]
                self._trouble = ""
                self._is_full = self._is_full and self._waiting.qsize() > MOST_WAITING // 2
            except BrokenPipeError:
                self.is_gone = True
                return
            except OSError as problem:  # a full disk: what is watched matters more than what is written
                self.dropped += 1
                self._trouble = problem.strerror or str(problem)
