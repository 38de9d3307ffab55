"""The files of a recording: appended to whole lines at a time, begun anew at a size, the oldest removed beyond a number.

Only files with a name like ours are ever removed. A line is in a file whole or not at all: what a full disk cuts off is
taken back.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

_OURS = re.compile(r"requests-\d{8}T\d{6}Z-(\d+)(?:-\d{4,})?\.jsonl", re.ASCII)
OTHERS_LEFT_S = 60.0  # another process may still be writing to a file of its own that changed so lately


class RecordFiles:
    """Where one process writes its lines."""

    def __init__(self, folder: str, bytes_max: int, files_max: int, started: float) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._stem = f"requests-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(started))}-{os.getpid()}"
        self._number = 0
        self._handle: int | None = None
        self._size = 0
        self.path = ""

    def append(self, lines: bytes) -> None:
        """Write whole lines, in a file that still has room; OSError if they are not written, and then none of them is."""
        if self._handle is not None and (self._size + len(lines) > self._bytes_max or not self._is_still_there()):
            self.close()
        if self._handle is None:
            self._open_next()
        assert self._handle is not None
        done = 0
        try:
            while done < len(lines):
                done += os.write(self._handle, lines[done:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += done

    def close(self) -> None:
        """Let go of the file; the next lines go to the next one."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _is_still_there(self) -> bool:
        """Whether the file still has its name: who cleans up by hand must not lose what comes after."""
        try:
            return os.stat(self.path).st_ino == os.fstat(self._handle or 0).st_ino  # noqa: PTH116
        except OSError:
            return False

    def _open_next(self) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            number = self._number + 1
            name = f"{self._stem}.jsonl" if number == 1 else f"{self._stem}-{number:04}.jsonl"
            path = os.path.join(self._folder, name)  # noqa: PTH118
            try:
                self._handle = os.open(path, flags, 0o600)
            except FileExistsError:
                self._number = number  # a container starts with the same process number each time
                continue
            self._number, self._size, self.path = number, 0, path
            break
        self._remove_oldest(time.time())

    def _remove_oldest(self, now: float) -> None:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                ours = _OURS.fullmatch(entry.name)
                if ours is None or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    changed = entry.stat(follow_symlinks=False).st_mtime
                except FileNotFoundError:
                    continue
                found.append((changed, entry.name, entry.path, int(ours[1]) == os.getpid()))
        found.sort()
        surplus = len(found) - self._files_max
        for changed, _, path, is_own in found:
            if surplus <= 0:
                break
            if path == self.path or (not is_own and now - changed < OTHERS_LEFT_S):
                continue
            with contextlib.suppress(OSError):  # another server was quicker, or it is not ours to remove: write on
                os.unlink(path)  # noqa: PTH108
            surplus -= 1
