"""An engine that guard starts itself (`plimsoll guard -- vllm serve ...`), stops, and finds again after its own death.

The process is no part of guard: a session of its own, its output straight into a file, nothing that ends with guard. A small
file names it by number, start, session, command and boot; a guard that comes later takes it over only where all of them agree,
and holds it by a pidfd, which never means another process. Where guard itself is a systemd service, that unit needs
KillMode=process: otherwise systemd sends the engine a signal of its own whenever guard is restarted.

Stopping signals the API server alone and waits. Past the deadline, SIGKILL goes to all that it ever started, also to processes
that made a session of their own. They are found through their parents while those live, so the tree is noted from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.journal import sync_folder
from plimsoll.hardware.processes import Mark, Process, ProcessTable, family, marks

# The process appends to its log itself: a pipe with a reader in guard would cost the process its life whenever guard dies. The
# file is kept small by copying it and cutting it to nothing ("copytruncate"). What is written between the last look and the cut
# is lost: as a rule a few microseconds, on busy cores a few milliseconds, once for every 64 MiB.
LARGEST_BYTES = 64 << 20
KEPT = 3
BLOCK_BYTES = 1 << 20
NEW_LIFE = b"plimsoll: the engine is started anew\n"


def open_log(path: Path) -> int:
    """A descriptor to append by, readable by this user alone; OSError where it is no plain file or cannot be had.

    Where an earlier process has written to it, a line says that a new one begins.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(22, "it is no plain file")
        os.fchmod(descriptor, 0o600)
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):  # on a full disk it is started all the same
        if os.fstat(descriptor).st_size:
            os.write(descriptor, b"\n" + NEW_LIFE)
    return descriptor


def rotate(path: Path, largest_bytes: int = LARGEST_BYTES, kept: int = KEPT) -> bool:
    """Keep a log that has outgrown its size as NAME.1, the older ones as NAME.2 and so on; whether it had.

    OSError where there is no room: then the log itself is as it was.
    """
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        what = os.fstat(source)
        if not stat.S_ISREG(what.st_mode) or what.st_size < largest_bytes:
            return False
        names = [path.with_name(f"{path.name}.{number}") for number in range(1, kept + 1)]
        with _new_file(path.with_name(f"{path.name}.new")) as (fresh, target), os.fdopen(os.dup(source), "rb") as log:
            shutil.copyfileobj(log, target, BLOCK_BYTES)
            for younger, older in reversed(list(pairwise(names))):
                with contextlib.suppress(FileNotFoundError):
                    younger.replace(older)
            fresh.replace(names[0])
            shutil.copyfileobj(log, target, BLOCK_BYTES)  # what has come meanwhile
            target.flush()
            os.ftruncate(source, 0)
    finally:
        os.close(source)
    return True


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A file of this user alone, never one that somebody else has open, or a link; it goes where the block fails."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield path, file
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


MOST_BYTES = 1 << 20
MOST_KIN = 4096
Number = Annotated[int, msgspec.Meta(gt=1, lt=2**62)]


class ProcessRecord(msgspec.Struct, frozen=True, tag_field="schema", tag="plimsoll.own-process/1"):
    """What guard must know again of a process that it started, after guard itself was killed."""

    pid: Number
    start_ticks: Number
    session: Number
    command: str  # a hash: the words may hold a secret
    boot: str
    asked: bool = False  # whether it was told to stop
    kin: tuple[tuple[Number, Number], ...] = ()  # marks of all that it had started when it was last looked at
    leaders: tuple[tuple[Number, Number], ...] = ()  # those of them that made a session of their own: it outlives them
    cgroup: str = ""

    @property
    def mark(self) -> Mark:
        """The process for good."""
        return self.pid, self.start_ticks


def command_mark(command: Sequence[str]) -> str:
    """The same for the same words only."""
    return hashlib.sha256("\0".join(command).encode("utf-8", "surrogateescape")).hexdigest()


def read_state(path: Path) -> ProcessRecord | None:
    """None where there is none; ValueError where it is damaged, OSError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=ProcessRecord)
    except msgspec.DecodeError:
        raise ValueError("it is damaged") from None


def write_state(path: Path, state: ProcessRecord) -> None:
    """Whole or not at all, and on the disk before this returns; OSError where that cannot be done."""
    kept = msgspec.structs.replace(state, kin=state.kin[:MOST_KIN], leaders=state.leaders[:MOST_KIN])
    with _new_file(path.with_name(f".{path.name}.new")) as (fresh, file):
        file.write(msgspec.json.encode(kept) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        fresh.replace(path)
    sync_folder(path.parent)


EXEC_LIMIT_S = 10.0
# Waits for one letter on stdin, which comes once guard has written down who it is, and becomes the command; should guard die
# before that, it ends: there is never an engine that nobody knows of. A number on the other descriptor says why it could not.
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
    command: Sequence[str], environment: Mapping[str, str], log: int, write_down: Callable[[int], None]
) -> subprocess.Popen[bytes]:
    """The process, once it has become the command; `write_down` is told its number before that.

    OSError where it cannot be started, or where `write_down` raised one: then there is no process.
    """
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(  # noqa: S603 - the operator's own command, word by word
            [sys.executable, "-I", "-S", "-c", _DOOR, str(writing), *command], env=dict(environment),
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
        # The other end is closed by becoming the command; a number there says why it could not.
        if not select.select([reading], [], [], EXEC_LIMIT_S)[0]:
            raise OSError(110, "it did not begin")
        if (number := os.read(reading, 16)).isdigit():
            raise OSError(int(number), os.strerror(int(number)))
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        os.close(reading)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    return child


LOOK_EVERY_S = 0.05
NOTE_EVERY_S = 10.0  # how old the notes on the tree may be
ORPHANS_S = 5.0  # Python's resource tracker tidies up after the API server has ended: it gets the time for it
KILL_LIMIT_S = 15.0

OURS, GONE, OTHER, UNKNOWN = "ours", "gone", "other", "unknown"


@dataclass(frozen=True, slots=True)
class OwnProcessConfig(key.ConfigTable):
    """[own]: the server that guard starts itself."""

    log: str | None = key.path("of the server behind --; default: engine.log beside the journal")
    state: str | None = key.path("who it is, to find it again; default: engine.state beside the journal")
    cgroup: str | None = key.path("a folder under /sys/fs/cgroup that guard may make cgroups in; default: none")


class OwnProcess:
    """One engine. `processes` reads the machine's process table, `boot` tells one boot from another (hardware/processes.py)."""

    replaces = False

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], state_path: Path, log_path: Path,
        processes: Callable[[], ProcessTable], boot: str, cgroup_parent: Path | None = None,
        log_bytes: int = LARGEST_BYTES, orphans_s: float = ORPHANS_S,
    ) -> None:  # fmt: skip
        """`cgroup_parent`: a control group (v2) that guard may make its own in; without one the tree is all there is."""
        assert command, "a command has a word at least"
        self._command, self._environment = tuple(command), environment
        self._state_path, self._log_path, self._log_bytes = state_path, log_path, log_bytes
        self._processes, self._boot, self._cgroup_parent = processes, boot, cgroup_parent
        self._started: ProcessRecord | None = None
        self._pidfd: int | None = None
        self._child: subprocess.Popen[bytes] | None = None  # as long as it is this guard's own child
        self._noted_s = -NOTE_EVERY_S
        self._orphans_s = orphans_s
        self._lock = asyncio.Lock()
        self._is_starting = False
        self._noting = threading.Lock()
        self.label = f"the process that guard started ({Path(command[0]).name[:60]})"

    async def is_running(self) -> bool | None:
        """Whether the API server lives; None where the state file cannot be trusted, or names another command's process."""
        how = await self._seen()
        if how == OURS and time.monotonic() - self._noted_s > NOTE_EVERY_S:
            await asyncio.to_thread(self._note)
        return {OURS: True, GONE: False}.get(how)

    async def pids(self) -> tuple[int, ...]:
        """The API server first, then all that it started; what it left behind, where it has ended."""
        if await self._seen() == OURS:
            await asyncio.to_thread(self._note)
        found = [process.pid for process in await asyncio.to_thread(self._family)]
        first = self._started.pid if self._started else 0
        return tuple(sorted(found, key=lambda pid: (pid != first, pid)))

    async def last_exit(self) -> Outcome:
        """How it ended: not yet (failed), or done with `asked`, and `exit_code` where it was this guard's child.

        An exit code of 0 that nobody asked for is a crash all the same.
        """
        how = await self._seen()
        if how != GONE or self._started is None:
            return failed("it has not ended" if how == OURS else "nothing is known of it")
        facts = self._exit_facts()
        asked = "as it was asked to" if self._started.asked else "without having been asked to"
        code = f"with exit code {facts['exit_code']}" if "exit_code" in facts else "with an exit code that nobody saw"
        return done(f"it ended {asked}, {code}", **facts)

    async def start(self) -> Outcome:
        """Start it; refused while the old one, or anything that it left, still lives."""
        async with self._lock:
            self._is_starting = True
            try:
                return await asyncio.to_thread(self._start)
            finally:
                self._is_starting = False

    async def stop(self, deadline_s: float) -> Outcome:
        """SIGTERM to the API server alone; past the deadline SIGKILL to all of it, for which there are 15 s more."""
        async with self._lock:
            how = self._look()
            if how in (OTHER, UNKNOWN):
                return failed(self._why_not(how))
            if how == GONE:
                return self._stopped("none", await self._kill_all(), was_running=False)
            assert self._pidfd is not None
            await asyncio.to_thread(self._note, asked=True)
            try:
                # vLLM takes a second one, from a guard that was killed after the first, for the same.
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            except ProcessLookupError:
                pass
            except OSError as problem:
                return failed(f"it may not be signalled ({problem.strerror})")
            end = time.monotonic() + deadline_s
            while not _has_ended(self._pidfd):
                if time.monotonic() >= end:
                    return self._stopped("kill", await self._kill_all())
                if time.monotonic() - self._noted_s > 1.0:
                    await asyncio.to_thread(self._note)
                await asyncio.sleep(LOOK_EVERY_S)
            end = time.monotonic() + self._orphans_s
            while await asyncio.to_thread(self._family) and time.monotonic() < end:
                await asyncio.sleep(LOOK_EVERY_S)
            return self._stopped("term", await self._kill_all())

    async def rotate_log(self) -> Outcome:
        """Keep the log small; to be called now and then."""
        try:
            was = await asyncio.to_thread(rotate, self._log_path, self._log_bytes)
        except OSError as problem:
            return failed(f"the engine's log cannot be made smaller ({problem.strerror})")
        return done("the engine's log was begun anew" if was else "the engine's log is small enough", rotated=was)

    async def _seen(self) -> str:
        """How it is, once a start under way is over: that one changes what is held."""
        if self._is_starting:
            async with self._lock:
                return self._look()
        return self._look()

    def _look(self) -> str:
        if self._pidfd is not None:
            if not _has_ended(self._pidfd):
                return OURS
            if self._child:
                self._child.poll()  # collected, so that nothing of it is left
        try:
            found = read_state(self._state_path)
        except (OSError, ValueError):
            return UNKNOWN
        if self._pidfd is not None:
            if found is None or self._started is None or found.mark == self._started.mark:
                return GONE
            self._forget()  # another guard has started a new one meanwhile
        if found is None or found.boot != self._boot:
            return GONE
        if not self._boot:
            return UNKNOWN
        self._started = found
        try:
            pidfd = os.pidfd_open(found.pid)
        except ProcessLookupError:
            return GONE
        except OSError:
            return UNKNOWN
        # The number is looked up after the process is held: it cannot be given to another one in between.
        process = self._processes().get(found.pid)
        if process is None or (process.start_ticks, process.session) != (found.start_ticks, found.session) or _has_ended(pidfd):
            os.close(pidfd)
            return GONE
        if found.command != command_mark(self._command):
            os.close(pidfd)
            return OTHER
        self._pidfd = pidfd
        return OURS

    def _why_not(self, how: str) -> str:
        if how == OTHER and self._started:
            return f"pid {self._started.pid} was started by guard with another command: stop it, or give that command again"
        return f"{self._state_path.name} cannot be read or is damaged: remove it once nothing of the engine runs"

    def _exit_facts(self) -> dict[str, str | float | bool]:
        facts: dict[str, str | float | bool] = {"asked": bool(self._started and self._started.asked)}
        code = self._child.poll() if self._child else None
        if code is not None:
            facts["exit_code"] = code if code >= 0 else 128 - code
            facts |= {"signal": -code} if code < 0 else {}
        return facts

    def _family(self) -> list[Process]:
        if self._started is None:
            return []
        known = (self._started.mark, *self._started.kin)
        return family(self._processes(), known, (self._started.mark, *self._started.leaders), {os.getpid()})

    def _note(self, *, asked: bool = False) -> None:
        """Write down what belongs to it now; what cannot be written is kept in mind at least."""
        with self._noting:  # whoever looks and whoever stops may both be at it
            before = self._started
            assert before is not None
            kin = [process for process in self._family() if process.pid != before.pid]
            leaders = {*before.leaders, *marks({process for process in kin if process.session == process.pid})}
            now = msgspec.structs.replace(
                before, kin=tuple(sorted(marks(kin))), leaders=tuple(sorted(leaders)), asked=asked or before.asked
            )
            self._noted_s = time.monotonic()
            if now != before:
                self._started = now
                with contextlib.suppress(OSError):
                    write_state(self._state_path, now)

    def _start(self) -> Outcome:
        try:
            for path in (self._state_path, self._log_path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._state_path.with_name(f"{self._state_path.name}.lock")
            with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._start_alone()
        except BlockingIOError:
            return failed("another guard is starting it at this moment", running=False)
        except OSError as problem:
            return failed(f"it cannot be started: {problem.filename or 'its files'}: {problem.strerror}")

    def _start_alone(self) -> Outcome:
        how = self._look()
        if how == OURS:
            assert self._started is not None
            return failed(f"it runs already, as pid {self._started.pid}", pid=self._started.pid, running=True)
        if how != GONE:
            return failed(self._why_not(how))
        if not self._boot:
            return failed("this machine does not tell one boot from another: guard cannot start a process of its own here")
        if left := self._family():
            return failed(f"{len(left)} process(es) of the one before still live", left=len(left))
        with contextlib.suppress(OSError):
            rotate(self._log_path, self._log_bytes)
        log = open_log(self._log_path)
        self._forget()
        try:
            child = start(self._command, self._environment, log, self._write_down)
        except OSError as problem:
            return failed(f"{self._command[0][:200]} cannot be started ({problem.strerror or problem})")
        except ValueError as problem:
            return failed(f"it cannot be started ({problem})")  # a NUL in a word
        finally:
            os.close(log)
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)
        return done(f"it was started as pid {child.pid}", pid=child.pid)

    def _write_down(self, pid: int) -> None:
        process = self._processes().get(pid)
        if process is None:
            raise OSError(3, "it ended before it began")
        group = ""  # of its own; where that is not possible the tree has to do
        if self._cgroup_parent is not None:
            folder = self._cgroup_parent / f"plimsoll-{pid}-{process.start_ticks}"
            try:
                folder.mkdir()
                (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")
                group = str(folder)
            except OSError:
                _remove_group(str(folder))
        command = command_mark(self._command)
        self._started = ProcessRecord(pid, process.start_ticks, process.session, command, self._boot, cgroup=group)
        write_state(self._state_path, self._started)

    def _forget(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = self._child = self._started = None

    async def _kill_all(self) -> tuple[int, int]:
        """How many were killed, and how many did not end even so."""
        killed: set[int] = set()
        end = time.monotonic() + KILL_LIMIT_S
        while left := await asyncio.to_thread(self._family):
            if time.monotonic() >= end:
                return len(killed), len(left)
            if self._started and self._started.cgroup:
                with contextlib.suppress(OSError):
                    (Path(self._started.cgroup) / "cgroup.kill").write_text("1", encoding="ascii")
            killed |= await asyncio.to_thread(self._kill, left)
            await asyncio.sleep(LOOK_EVERY_S)
        if self._started:
            _remove_group(self._started.cgroup)
        return len(killed), 0

    def _kill(self, processes: list[Process]) -> set[int]:
        """Kill just these, not whoever may have one of their numbers by now: each is held before it is looked at again."""
        held, killed = dict[Process, int](), set[int]()
        with contextlib.ExitStack() as files:
            for process in processes:
                with contextlib.suppress(OSError):
                    held[process] = os.pidfd_open(process.pid)
                    files.callback(os.close, held[process])
            now = self._processes()
            for process, pidfd in held.items():
                if process.pid in now and now[process.pid].start_ticks == process.start_ticks:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        killed.add(process.pid)
        return killed

    def _stopped(self, how: str, told: tuple[int, int], *, was_running: bool = True) -> Outcome:
        killed, left = told
        facts: dict[str, str | float | bool] = {"how": how, "killed": killed, "left": left, "was_running": was_running}
        facts |= self._exit_facts()
        if left:
            return failed(f"{left} process(es) do not end, not even by SIGKILL", **facts)
        if self._pidfd is not None and not _has_ended(self._pidfd):
            return unsure("it was killed, but has not ended yet", **facts)
        if how == "kill":
            return done(f"it did not end in time: all {killed} processes were killed", **facts)
        rest = f", and {killed} process(es) that it had left were killed" if killed else ""
        return done(("it ended" if was_running else "it was not running") + rest, **facts)


def _has_ended(pidfd: int) -> bool:
    """A pidfd can be read as soon as its process has ended, collected or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _remove_group(group: str) -> None:
    if group:
        with contextlib.suppress(OSError):
            Path(group).rmdir()
