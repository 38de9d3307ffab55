"""Runs a program to its end: no shell, a session of its own, a time limit, and only so much of its output.

Its output goes to a file without a name, not to a pipe: a service that it leaves running keeps that output, and would be
killed by a write into a pipe that nobody reads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple, TypeVar

from plimsoll.doctor.read.redact_text import shown_line

MOST_BYTES = 16 << 20
LOOK_EVERY_S = 0.02
PLAIN = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")
PASSED_ON = (*PLAIN, "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


def small_environment(more: Mapping[str, str] | None = None, passed_on: Sequence[str] = PASSED_ON) -> dict[str, str]:
    """Returns the environment for somebody else's program: nothing of guard's own, such as its tokens."""
    return {name: os.environ[name] for name in passed_on if name in os.environ} | dict(more or {})


class CommandResult(NamedTuple):
    """Result of one run of a program."""

    code: int | None  # None: it did not end by itself, or was never there
    output: bytes  # of stdout and stderr together, or of stdout alone; the last bytes of it
    trouble: str = ""  # why there is no code
    complaints: bytes = b""  # of stderr, where it is kept apart
    was_started: bool = True

    @property
    def last_line(self) -> str:
        return last_line(self.output)

    @property
    def last_words(self) -> str:
        """The last line of output, to be appended to a message of guard's; empty where there is none."""
        words = shown_line(self.last_line)[:200]
        return f": {words}" if words else ""


def last_line(data: bytes) -> str:
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


async def run_command(
    argv: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str],
    *,
    only_stdout: bool = False,
    folder: str | None = None,
    keep_bytes: int = 64 << 10,
    most_bytes: int = MOST_BYTES,
) -> CommandResult:
    """Runs the program until it ends; past the time limit or the output limit, kills its whole process group.

    If it ended by itself, processes that it left are not killed: one may be the very service that it started.
    """
    with contextlib.ExitStack() as files:
        try:
            output = files.enter_context(tempfile.TemporaryFile())
            errors = files.enter_context(tempfile.TemporaryFile()) if only_stdout else output
        except OSError as problem:
            return CommandResult(None, b"", f"there is no room for its output ({problem.strerror})", was_started=False)
        try:
            child = subprocess.Popen(  # noqa: S603 - the operator's own words, and no shell that could read them otherwise
                list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
                env=dict(environment), cwd=folder,
            )  # fmt: skip
        except (OSError, ValueError) as problem:
            why = f"it cannot be started ({getattr(problem, 'strerror', None) or problem})"
            return CommandResult(None, b"", why, was_started=False)
        trouble, end = "", time.monotonic() + limit_s
        try:
            while child.poll() is None and not trouble:
                if time.monotonic() >= end:
                    trouble = f"it did not end within {limit_s:g} s"
                elif any(os.fstat(file.fileno()).st_size > most_bytes for file in (output, errors)):
                    trouble = "it prints without end"
                else:
                    await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel cannot be killed
                    child.wait(timeout=1.0)
        complaints = _tail(errors, keep_bytes) if only_stdout else b""
        return CommandResult(None if trouble else child.returncode, _tail(output, keep_bytes), trouble, complaints)


def _tail(output: IO[bytes], keep_bytes: int) -> bytes:
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), keep_bytes, max(0, size - keep_bytes))


# Work that may hang in the kernel runs in a thread that nobody waits for, not even guard's own end.

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Returns or raises what `work` does; if this is cancelled, the thread goes on by itself."""
    job: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            try:
                job.set_result(work())
            except Exception as error:  # raised in the caller
                job.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(job)
