"""Appends one JSON line for each finished request to a folder, if `PLIMSOLL_RECORD` names one; never text.

The event loop only puts a small value into a queue; a thread of its own turns it into a line, hashes the prompt's blocks
if that is asked for, and writes. A full queue drops the request and counts it: vLLM is never made to wait.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from plimsoll.inside import places
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.finished import Finished, Seen, as_row
from plimsoll.inside.prefixes import BLOCK_TOKENS, iter_hashes, shared_salt
from plimsoll.inside.record_files import RecordFiles
from plimsoll.inside.settings import Settings

QUEUE_REQUESTS = 20_000
QUEUE_TOKENS = 8_000_000  # prompts that wait for their hashes are held as lists of numbers: 64 MB
FLUSH_S = 0.5
RETRY_S = 10.0  # after a write that failed
EXIT_LIMIT_S = 1.0
HASHES_A_TURN = 128  # then other threads have theirs: the event loop waits for the interpreter meanwhile
BYTES_A_WRITE = 256 << 10


class Recorder:
    """The recording of this process: off without a folder; a thread and a file once there is something to write."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.is_on = bool(settings.record_folder)
        self.wants_prefixes = self.is_on and settings.record_prefixes
        self.written = 0
        self.dropped = 0
        self._begin()
        if self.is_on:
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """As at the start; a forked child has neither its parent's thread nor a right to its file and its queue."""
        self._queue: deque[Finished] = deque()
        self._tokens_queued = 0
        self._tokens_done = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_over = False
        self._files: RecordFiles | None = None
        self._salt = b""

    def note_finished(self, request: Finished) -> None:
        """Take one finished request; quick, and it never waits."""
        if not self.is_on or self._is_over:
            return
        if len(self._queue) >= QUEUE_REQUESTS:
            self._drop(1)
            return
        seen = request.seen
        if seen is not None and seen.token_ids is not None:
            if not self.wants_prefixes or self._tokens_queued - self._tokens_done > QUEUE_TOKENS:
                if self.wants_prefixes:
                    FAULTS.say("hashing prompts", "prompts come faster than they are hashed; some are recorded without hashes")
                request = request._replace(seen=seen._replace(token_ids=None))
            else:
                self._tokens_queued += len(seen.token_ids)
        self._queue.append(request)
        if self._thread is None:
            self._start()

    def close(self, limit_s: float = EXIT_LIMIT_S) -> None:
        """Write what is left, for so long at most; nothing is taken afterwards."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def state(self) -> dict[str, Any]:
        """Whether it records, where to, and how much; `waiting` has come and is not written yet."""
        return {
            "is_on": self.is_on,
            "folder": self._settings.record_folder or None,
            "file": self._files.path if self._files else None,
            "written": self.written,
            "waiting": len(self._queue),
            "dropped": self.dropped,
            "prefixes": self.wants_prefixes,
        }

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_on, name="plimsoll-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if multiprocessing.parent_process() is not None:
            # A process that multiprocessing forked ends without atexit; it runs these instead.
            from multiprocessing.util import Finalize

            Finalize(None, self.close, exitpriority=100)

    def _drop(self, requests: int) -> None:
        self.dropped += requests
        FAULTS.say("recording requests", "requests finish faster than they are written; some are not recorded")

    def _write_on(self) -> None:
        """The thread: every half second all that came, in order; after a failure the same again, later."""
        left: list[bytes] = []
        while True:
            is_last = self._is_over
            try:
                self._write_all(left)
                pause_s = FLUSH_S
            except Exception as error:
                FAULTS.note("writing the recording", error)
                pause_s = RETRY_S
            if is_last:
                return
            self._wake.wait(pause_s)

    def _write_all(self, left: list[bytes]) -> None:
        """`left` are lines of an earlier turn that could not be written; they stay in it until they are."""
        most = min(BYTES_A_WRITE, self._settings.record_bytes)
        while left or self._queue:
            size = sum(map(len, left))
            while self._queue and size < most:
                line = self._line(self._queue.popleft())
                if line:
                    size += len(line)
                    left.append(line)
            if not left:
                return
            if self._files is None:
                chosen = self._settings
                self._files = RecordFiles(chosen.record_folder, chosen.record_bytes, chosen.record_files, time.time())
            self._files.append(b"".join(left))
            self.written += len(left)
            left.clear()

    def _line(self, request: Finished) -> bytes:
        """One line; a request that makes none is counted and left out, so that it does not stop the others."""
        seen = request.seen
        ids = None if seen is None else seen.token_ids
        if ids is not None:
            self._tokens_done += len(ids)  # also of one that makes no line
        try:
            row = as_row(request)
            if seen is not None and ids is not None and (hashes := self._hashes(seen, ids)):
                row["prefix_block"] = BLOCK_TOKENS
                row["prefix_hashes"] = hashes
            return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        except Exception as error:
            FAULTS.note("a line of the recording", error)
            self.dropped += 1
            return b""

    def _hashes(self, seen: Seen, ids: Sequence[int]) -> list[str]:
        if not self._salt:
            chosen = self._settings
            self._salt = shared_salt(chosen.record_salt, places.run_folder(chosen.folder), places.server_key())
        found: list[str] = []
        hashes = iter_hashes(ids, self._salt, BLOCK_TOKENS, seen.seed, seen.marks)
        while turn := list(islice(hashes, HASHES_A_TURN)):
            found += turn
            time.sleep(0)
        return found


RECORDER = Recorder(Settings())  # one a process
