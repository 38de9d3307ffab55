"""The shared state of one vLLM server's API servers: the drain, sleep and shedding on one page, and each server's own counts.

Each API server writes a page of its own and reads those of the others; the sum is the server's. The common page is changed
under a lock. All pages are in the folder of places.py, named after the process that started the server and the time of its
start, so that another process with the same number never finds old pages.
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

from plimsoll.inside.admission import Drain
from plimsoll.inside.door import FIELDS as DOOR
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import is_same_process, start_ticks, sweep

# A number is read and written in one aligned store, so a reader never sees half of one. Numbers that belong together change
# and are read under a lock between processes.

# A writer needs microseconds, but may have lost its turn on the processor. A reader waits no longer than this, and then takes
# the values from before the change.
LONGEST_WAIT_S = 0.02
# The same for a writer, which waits in a server's event loop: the process that holds the lock may have been stopped.
LONGEST_LOCK_WAIT_S = 0.25


class SharedPage:
    """Named whole numbers in shared memory, all 0 at first; without a path they are this process's own."""

    def __init__(self, fields: Sequence[str], path: str | None = None, *, makes: bool = True) -> None:
        """`makes`: a missing file is made; else the file is another process's, and must be there."""
        self.path = path
        self._is_changing = False
        self._whole: dict[Sequence[str], list[int]] = {}  # the last consistent values of each group of names
        self._index = {name: place for place, name in enumerate(fields)}
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
        """Changes one number; only for pages that a single thread of a single process writes."""
        place = self._index[name]
        value = self._numbers[place] + change
        self._numbers[place] = value
        return value

    def together(self, names: tuple[str, ...]) -> list[int]:
        """Returns several numbers as they were at one moment: now, or before a change that does not end."""
        if self._is_changing or self._locked(fcntl.LOCK_SH, LONGEST_WAIT_S):
            self._whole[names] = [self[name] for name in names]
            if not self._is_changing:
                self._unlock()
        return self._whole.get(names, [0] * len(names))

    @contextlib.contextmanager
    def changing(self, patience_s: float = LONGEST_LOCK_WAIT_S) -> Iterator[None]:
        """Holds the page's lock during the block; readers wait for its end. Raises TimeoutError if another keeps the lock."""
        if not self._locked(fcntl.LOCK_EX, patience_s):
            raise TimeoutError("another process does not let go of the page")
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
            self._unlock()

    def _locked(self, how: int, patience_s: float) -> bool:
        end = time.monotonic() + patience_s
        while self._file >= 0:
            try:
                fcntl.flock(self._file, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
            except OSError:  # a folder without locks
                return False
            time.sleep(0.0002)
        return True

    def _unlock(self) -> None:
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _opened(path: str, size: int, *, makes: bool) -> int:
    """Returns the open file, large enough to be mapped. Raises FileNotFoundError for one that is missing or unfinished."""
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


NS = 1_000_000_000
COMMON = (
    "epoch", "since_ns", "until_ns", "quiet_ns", "bound_ns", "is_refusing", "retry_after_s",  # the drain
    "asleep", "asleep_at_ns",  # 0 awake, 1 paused, 2 asleep
    "shed_bound_ns", "shed_until_ns",
    "wedged_at_ns",  # when the engine was proven stuck; 0 if not
)  # fmt: skip
OWN = (
    "pid", "started", "beat_ns", "in_flight", "begun", "refused_drain", "refused_shed", "refused_dead", "last_admitted_ns",
    "background", "engine_requests", "running", "waiting", "steps", "last_step_ns",
    "figures_ns", "longest_step_ns",
    "queued_requests", "queued_tokens", "coming", "tokens_per_s_milli", "tokens_each_milli", "is_fed",
    "ended_seen",  # requests that had ended when `background` and `engine_requests` were last counted
    *DOOR,
)  # fmt: skip
_DRAIN = COMMON[:7]
PAUSED = 1
ASLEEP = 2


class Shared:
    """The common page, this API server's own, and those of the other API servers (its fellows)."""

    def __init__(self, folder: str | None, key: int, *, fellows_expected: bool) -> None:
        self.key = key
        # Without a way to reach its fellows a drain would stop one API server of several: worse than none.
        self.can_drain = folder is not None or not fellows_expected
        self._folder = folder
        self._stem = f"{key}-{start_ticks(key)}"
        if folder is not None:
            sweep(folder)
        self.common = SharedPage(COMMON, self._path(f"gate-{self._stem}.page"))
        self.own = SharedPage(OWN, self._path(f"api-{self._stem}-{os.getpid()}.page"))
        self.own["pid"] = os.getpid()
        self.own["started"] = start_ticks(os.getpid())
        self._fellows: dict[str, SharedPage] = {}

    def _path(self, name: str) -> str | None:
        return None if self._folder is None else os.path.join(self._folder, name)  # noqa: PTH118

    # The fellows

    def pages(self, *, look: bool = False) -> list[SharedPage]:
        """Returns the pages of all living API servers, this one's first; `look` looks for new ones."""
        if look and self._folder is not None:
            self._look(self._folder)
        return [self.own, *self._fellows.values()]

    def _look(self, folder: str) -> None:
        prefix = f"api-{self._stem}-"
        own = os.path.basename(self.own.path or "")  # noqa: PTH119
        try:
            names = {entry for entry in os.listdir(folder) if entry.startswith(prefix) and entry != own}  # noqa: PTH208
        except OSError as error:
            FAULTS.note("looking for the other API servers", error)
            return
        for name in names - self._fellows.keys():
            # A missing file was removed since, or its writer has not finished it.
            with FAULTS.noting("reading another API server's page"), contextlib.suppress(FileNotFoundError):
                self._fellows[name] = SharedPage(OWN, self._path(name), makes=False)
        for name, page in list(self._fellows.items()):
            # A name may be gone while its server lives: somebody removed the file, and the memory is still shared.
            # A page that was just made has no pid yet.
            is_gone = not is_same_process(page["pid"], page["started"]) if page["pid"] else name not in names
            if is_gone:
                self._fellows.pop(name).close()

    def total(self, name: str) -> int:
        """Returns the sum over all API servers found at the last look."""
        return sum(page[name] for page in self.pages())

    def latest(self, name: str) -> int:
        """Returns the largest value over all API servers found at the last look."""
        return max(page[name] for page in self.pages())

    @property
    def is_first(self) -> bool:
        """True if this API server has the lowest process number: it alone reports the figures of the whole server."""
        return all(self.own["pid"] <= page["pid"] or page["pid"] == 0 for page in self.pages())

    # The drain

    def drain(self) -> Drain:
        epoch, since, until, quiet, bound, is_refusing, retry = self.common.together(_DRAIN)
        if since == 0:
            return Drain(epoch=epoch)
        return Drain(epoch, since / NS, until / NS, quiet / NS, bound / NS, bool(is_refusing), retry)

    def set_drain(self, drain: Drain) -> None:
        """Writes the drain to the common page; call it inside `common.changing()`."""
        values = (
            drain.epoch, round(drain.since * NS), round(drain.until * NS), round(drain.quiet_s * NS), round(drain.bound_s * NS),
            int(drain.is_refusing), drain.retry_after_s,
        )  # fmt: skip
        for name, value in zip(_DRAIN, values, strict=True):
            self.common[name] = value

    def close(self) -> None:
        """Closes all pages, and removes this API server's page."""
        for page in (*self._fellows.values(), self.common, self.own):
            page.close()
        if self.own.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.own.path)  # noqa: PTH108
