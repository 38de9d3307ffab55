"""Whole numbers that several processes share: a small file mapped into memory, one 64-bit number for each field.

A number is read and written in one aligned store, so a reader never sees half of one. What must change together is changed
under `Page.changing()`: a lock between processes, and a sequence number by which a reader sees that it came in between.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator, Sequence

TRIES = 20  # reads at once before the reader makes way for the writer
# A writer needs microseconds, but may have lost its turn on the processor. It is not waited for longer than this: then what
# was there before it began is taken.
LONGEST_WAIT_S = 0.02
# The same for who wants to write, in the event loop of a server: the one inside may have been stopped there.
LONGEST_LOCK_WAIT_S = 0.25


class Page:
    """Named whole numbers in shared memory, all 0 at first; without a path they are this process's own."""

    def __init__(self, fields: Sequence[str], path: str | None = None, *, makes: bool = True) -> None:
        """With `makes` the file is made where there is none; without it is somebody else's, and must be there."""
        self.path = path
        self._is_changing = False
        self._whole: dict[Sequence[str], list[int]] = {}  # what was last read together
        self._index = {name: place for place, name in enumerate(("sequence", *fields))}
        size = 8 * len(self._index)
        if path is None:
            self._file = -1
            self._memory = mmap.mmap(-1, size)
        else:
            self._file = _opened(path, size, makes=makes)
            self._memory = mmap.mmap(self._file, size)
        self._numbers = memoryview(self._memory).cast("q")

    def __getitem__(self, name: str) -> int:
        return self._numbers[self._index[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._numbers[self._index[name]] = value

    def add(self, name: str, change: int) -> int:
        """Change one number; only for pages that a single thread of a single process writes."""
        place = self._index[name]
        value = self._numbers[place] + change
        self._numbers[place] = value
        return value

    def together(self, names: tuple[str, ...]) -> list[int]:
        """Several numbers as they were at one moment: this one, or the last one before a change that does not end."""
        places = [self._index[name] for name in names]
        end = 0.0
        while True:
            for _ in range(TRIES):
                before = self._numbers[0]
                values = [self._numbers[place] for place in places]
                if before % 2 == 0 and self._numbers[0] == before:
                    self._whole[names] = values
                    return values
            end = end or time.monotonic() + LONGEST_WAIT_S
            if self._file < 0 or self._is_changing:
                return values
            if time.monotonic() > end:
                return self._whole.get(names, [0] * len(names))
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.0002)
                continue
            # No writer is inside; one that was killed there has left an odd sequence number.
            values = [self._numbers[place] for place in places]
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._whole[names] = values
            return values

    @contextlib.contextmanager
    def changing(self, patience_s: float = LONGEST_LOCK_WAIT_S) -> Iterator[None]:
        """Alone among all processes while inside; readers wait for the end. TimeoutError where another stays inside."""
        if self._file >= 0:
            _lock(self._file, patience_s)
        try:
            self._is_changing = True
            self._numbers[0] |= 1
            yield
        finally:
            self._numbers[0] = (self._numbers[0] | 1) + 1
            self._is_changing = False
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._numbers.release()
        self._memory.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _lock(file: int, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError("another process does not let go of the page") from None
        time.sleep(0.0002)


def _opened(path: str, size: int, *, makes: bool) -> int:
    """The file, large enough to be mapped; FileNotFoundError for one that is not there or not finished yet."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags | os.O_CREAT if makes else flags, 0o600)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if about.st_size < size:
            if not makes:
                raise FileNotFoundError(errno.ENOENT, "not finished yet")
            os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file
