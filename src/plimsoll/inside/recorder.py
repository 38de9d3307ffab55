"""Appends one JSON line for each finished request to a folder, if `PLIMSOLL_RECORD` names one; never a request's text.

The event loop only puts a small value into a queue; a separate thread turns it into a line, hashes the prompt's blocks
if wanted, and writes. When the queue is full the request is dropped and counted: vLLM never waits.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.settings import InsideSettings

# Salted hashes of a prompt's blocks show equal beginnings and nothing else of the prompt. Each hash covers its block and all
# before it, under a key that is not written down. If a hash were made only of the previous hash and its block, a reader of the
# file could try likely texts block by block without the key.

BLOCK_TOKENS = 16
HASH_BYTES = 8
SALT_BYTES = 32

Mark = tuple[int, str]
"""A token's place and what stands there: placeholders of two pictures are the same tokens."""


def iter_hashes(
    token_ids: Sequence[int], salt: bytes, block: int = BLOCK_TOKENS, seed: str = "", marks: Sequence[Mark] = ()
) -> Iterator[str]:
    """Yields the hash of each full block in turn, 16 hex digits; prompts of different `seed` share none."""
    running = hashlib.blake2b(seed.encode("utf-8", "replace"), digest_size=HASH_BYTES, key=hashlib.blake2b(salt).digest())
    running.update(b"\0")
    step = block * 8
    packed = memoryview(array("q", token_ids[: len(token_ids) // block * block])).cast("B")
    left = sorted(marks)
    for begin in range(0, len(packed), step):
        while left and left[0][0] * 8 < begin + step:
            running.update(b"\1" + left.pop(0)[1].encode("utf-8", "replace") + b"\0")
        running.update(packed[begin : begin + step])
        yield running.copy().hexdigest()


# Only files with a name like ours are ever removed. A line is in a file whole or not at all: one that a full disk cuts off is
# removed again.

_OURS = re.compile(r"requests-\d{8}T\d{6}Z-(\d+)(?:-\d{4,})?\.jsonl", re.ASCII)
OTHERS_LEFT_S = 60.0  # another process's file that changed within this time may still be written to


class RecordFiles:
    """The files that one process writes its lines to."""

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
        """Writes whole lines to a file that still has room. Raises OSError if it cannot; then none of them is written."""
        if self._handle is not None:
            is_there = False  # if someone removed the file by hand, later lines must not be lost
            with contextlib.suppress(OSError):
                is_there = os.stat(self.path).st_ino == os.fstat(self._handle).st_ino  # noqa: PTH116
            if not is_there or self._size + len(lines) > self._bytes_max:
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
        """Closes the file; the next lines go to the next one."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

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
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                ours = _OURS.fullmatch(entry.name)
                if ours is None or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    changed = entry.stat(follow_symlinks=False).st_mtime
                except FileNotFoundError:
                    continue
                files.append((changed, entry.name, entry.path, int(ours[1]) == os.getpid()))
        files.sort()
        surplus = len(files) - self._files_max
        for changed, _, path, is_own in files:
            if surplus <= 0:
                break
            if path == self.path or (not is_own and now - changed < OTHERS_LEFT_S):
                continue
            with contextlib.suppress(OSError):  # another server was quicker, or it is not ours to remove: write on
                os.unlink(path)  # noqa: PTH108
            surplus -= 1


# vLLM's own objects differ from release to release: each figure is looked for, and one that was not measured is None. Arrival,
# first token and end are the API server's times, which clients see; the engine's stamps are on its own clock, so only their
# differences are used. The two differ where the API server lags behind its engine.

SCHEMA = "plimsoll.request/1"
SLACK_S = 0.5  # clocks and rounding may put a stamp so far before the arrival; one further off was never measured
MOST_TOKENS = 10**9
LATEST_S = 3.9e9  # seconds since 1970: the year 2093
ON_REQUEST = "plimsoll_seen"
"""The attribute of vLLM's own objects under which we leave a `Seen`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The facts about a request that are known only when it comes in."""

    priority: int | None
    token_ids: Sequence[int] | None
    """Referred to until the line is written; never written."""
    seed: str
    marks: tuple[Mark, ...]
    first_token_s: float | None = None
    """From its arrival to its first token at the API server; known when it is over."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One ended request; times are seconds since 1970."""

    arrival: float
    finished: float
    prompt_tokens: int
    output_tokens: int
    reason: str
    scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    max_tokens: int | None = None
    engine: int | None = None
    seen: Seen | None = None

    @property
    def is_cut_off(self) -> bool:
        return self.reason not in ("stop", "length", "repetition")


def from_stats(stats: Any, at: float, engine: int) -> Finished:
    """Returns a request that vLLM counts as finished; `at` is when its last output reached the API server."""
    arrival = at - max(float(stats.e2e_latency), 0.0)
    output = _count(stats.num_generation_tokens) or 0
    scheduled = _after(at - float(stats.inference_time), arrival, at)
    first = _after(at - float(stats.decode_time), arrival, at) if output and scheduled is not None else None
    seen = getattr(stats, ON_REQUEST, None)
    if first is not None and seen is not None and seen.first_token_s:
        # Counting back from the end would put the API server's lag at the end before the first token.
        shown = _after(arrival + seen.first_token_s, arrival, at)
        if shown is not None:
            scheduled = _after(shown - (float(stats.inference_time) - float(stats.decode_time)), arrival, shown)
            first = shown
    return Finished(
        arrival,
        at,
        _count(stats.num_prompt_tokens) or 0,
        output,
        str(stats.finish_reason),
        scheduled,
        _not_before(first, scheduled),
        _count(getattr(stats, "num_cached_tokens", None)) if first is not None else None,
        _count(getattr(stats, "num_preemptions", None)),
        _count(getattr(stats, "max_tokens_param", None)),
        engine,
        seen,
    )


def from_state(state: Any, at: float) -> Finished | None:
    """Returns a request that its client gave up, which vLLM counts nowhere; None where vLLM keeps no figures of requests."""
    stats = state.stats
    if stats is None or not stats.arrival_time:
        return None
    arrival = min(float(stats.arrival_time), at)
    output = _count(stats.num_generation_tokens) or 0
    scheduled = first = None
    latency_s = getattr(stats, "first_token_latency", 0.0)
    if output and latency_s > 0:
        first = _after(arrival + latency_s, arrival, at)
        if first is not None and stats.scheduled_ts > 0:
            scheduled = _after(first - (stats.first_token_ts - stats.scheduled_ts), arrival, first)
    return Finished(
        arrival,
        at,
        _count(state.prompt_len) or 0,
        output,
        "abort",
        scheduled,
        _not_before(first, scheduled),
        _count(getattr(state, "num_cached_tokens", None)) if output else None,
        _count(getattr(stats, "num_preemptions", None)) if output else None,
        _count(getattr(state, "max_tokens_param", None)),
        None,
        getattr(state, ON_REQUEST, None),
    )


def as_row(request: Finished) -> dict[str, Any]:
    """Returns a line of a recording as docs/traces.md describes it, without hashes; unknown figures are left out.

    Raises ValueError for a clock that no reader would believe: one such line would spoil the whole file.
    """
    if not 0 <= request.arrival <= request.finished <= LATEST_S:
        raise ValueError("a time out of range")
    row: dict[str, Any] = {
        "schema": SCHEMA,
        "arrival": round(request.arrival, 6),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "finish_reason": request.reason[:32],
    }
    for name in ("cached_tokens", "preemptions", "max_tokens", "engine", "priority", "scheduled", "first_token", "finished"):
        value = getattr(request.seen if name == "priority" else request, name, None)
        if value is not None:
            row[name] = round(value, 6)
    return row


def _after(stamp: float, earliest: float, latest: float) -> float | None:
    """Returns the stamp, moved into its bounds; None if it is more than SLACK_S outside them."""
    if not math.isfinite(stamp) or stamp < earliest - SLACK_S or stamp > latest + SLACK_S:
        return None
    return min(max(stamp, earliest), latest)


def _not_before(stamp: float | None, earlier: float | None) -> float | None:
    return max(stamp, earlier) if stamp is not None and earlier is not None else stamp


def _count(number: Any) -> int | None:
    """Returns a whole number that a recording may hold, else None."""
    return number if type(number) is int and 0 <= number <= MOST_TOKENS else None


QUEUE_REQUESTS = 20_000
QUEUE_TOKENS = 8_000_000  # prompts that wait for their hashes are held as lists of numbers: 64 MB
FLUSH_S = 0.5
RETRY_S = 10.0  # after a write that failed
EXIT_LIMIT_S = 1.0
HASHES_A_TURN = 128  # then other threads may run: the event loop waits for the interpreter meanwhile
BYTES_A_WRITE = 256 << 10


class Recorder:
    """The recording of this process: off without a folder; a thread and a file once there is something to write."""

    def __init__(self, settings: InsideSettings) -> None:
        self._settings = settings
        self.is_on = bool(settings.record_folder)
        self.wants_prefixes = self.is_on and settings.record_prefixes
        self._salt = settings.record_salt.encode("utf-8", "replace") or os.urandom(SALT_BYTES)
        self.written = 0
        self.dropped = 0
        self._begin()
        if self.is_on:
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Sets the state at the start; also in a forked child, which must not use its parent's thread, file or queue."""
        self._queue: deque[Finished] = deque()
        self._tokens_queued = 0
        self._tokens_done = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_over = False
        self._files: RecordFiles | None = None

    def note_finished(self, request: Finished) -> None:
        """Takes one finished request; quick, and it never waits."""
        if not self.is_on or self._is_over:
            return
        if len(self._queue) >= QUEUE_REQUESTS:
            self.dropped += 1
            FAULTS.say("recording requests", "requests finish faster than they are written; some are not recorded")
            return
        seen = request.seen
        if seen is not None and seen.token_ids is not None:
            if not self.wants_prefixes or self._tokens_queued - self._tokens_done > QUEUE_TOKENS:
                if self.wants_prefixes:
                    FAULTS.say("hashing prompts", "prompts come faster than they are hashed; some are recorded without hashes")
                request = replace(request, seen=replace(seen, token_ids=None))
            else:
                self._tokens_queued += len(seen.token_ids)
        self._queue.append(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="plimsoll-recorder", daemon=True)
            self._thread.start()
            atexit.register(self.close)
            if multiprocessing.parent_process() is not None:
                # A process that multiprocessing forked ends without atexit; it runs these instead.
                from multiprocessing.util import Finalize

                Finalize(None, self.close, exitpriority=100)

    def close(self, limit_s: float = EXIT_LIMIT_S) -> None:
        """Writes the rest of the queue within `limit_s`; takes no requests afterwards."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _write_on(self) -> None:
        """The thread: writes all new requests in order every half second; after a failure it tries again later."""
        left: list[bytes] = []
        while True:
            is_last, pause_s = self._is_over, RETRY_S
            with FAULTS.noting("writing the recording"):
                self._write_all(left)
                pause_s = FLUSH_S
            if is_last:
                return
            self._wake.wait(pause_s)

    def _write_all(self, left: list[bytes]) -> None:
        """Writes the queue; `left` holds lines of an earlier turn that could not be written, until they are."""
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
            chosen = self._settings
            if self._files is None:
                self._files = RecordFiles(chosen.record_folder, chosen.record_bytes, chosen.record_files, time.time())
            self._files.append(b"".join(left))
            self.written += len(left)
            left.clear()

    def _line(self, request: Finished) -> bytes:
        """Returns one request's line; empty for a request that makes none, which is counted and does not stop the others."""
        seen = request.seen
        ids = None if seen is None else seen.token_ids
        if ids is not None:
            self._tokens_done += len(ids)  # also for a request that makes no line
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
        digests: list[str] = []
        hashes = iter_hashes(ids, self._salt, BLOCK_TOKENS, seen.seed, seen.marks)
        while turn := list(islice(hashes, HASHES_A_TURN)):
            digests += turn
            time.sleep(0)
        return digests


RECORDER = Recorder(InsideSettings())  # one for each process
