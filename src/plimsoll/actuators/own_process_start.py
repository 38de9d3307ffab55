"""Starts a process that is not to be lost: it waits at the door until guard has written down who it is.

If guard dies before that, the process ends without having become the engine. So there is never an engine that nobody knows of.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

EXEC_LIMIT_S = 10.0

# Waits for one letter on stdin; becomes the command. A number on the other descriptor says why it could not.
_DOOR = """
import os, signal, sys
report = int(sys.argv[1])
os.set_inheritable(report, False)
if os.read(0, 1) != b"g":
    os._exit(125)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
    signal.signal(one, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as problem:
    os.write(report, str(problem.errno).encode())
os._exit(127)
"""


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    log: int,
    write_down: Callable[[int], None],
) -> subprocess.Popen[bytes]:
    """The process, once it has become the command; `write_down` is told its number before that.

    OSError where it cannot be started, or where `write_down` raised one: then there is no process.
    """
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(  # noqa: S603 - the operator's own command, word by word
            [sys.executable, "-I", "-S", "-c", _DOOR, str(writing), *command], env=dict(environment), cwd=folder,
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=(writing,), bufsize=0,
        )  # fmt: skip
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    assert child.stdin is not None
    try:
        write_down(child.pid)
        child.stdin.write(b"g")
        _became_it(reading)
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        os.close(reading)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    return child


def _became_it(reading: int) -> None:
    """Return when the other end was closed by becoming the command; OSError with the reason if it could not."""
    if not select.select([reading], [], [], EXEC_LIMIT_S)[0]:
        raise OSError(110, "it did not begin")
    said = os.read(reading, 16)
    if said.isdigit():
        raise OSError(int(said), os.strerror(int(said)))
