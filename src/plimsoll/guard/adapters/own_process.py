"""An engine that guard starts itself (`plimsoll guard -- vllm serve ...`), stops, and finds again after its own death.

The process outlives guard: it has a session of its own, and writes its output straight into a file. A small state file
names it by pid, start, session, command and boot; a later guard takes it over only where all of them agree,
and holds it by a pidfd, which never means another process. Where guard itself is a systemd service, that unit needs
KillMode=process: otherwise systemd sends the engine a signal of its own whenever guard is restarted.

A stop signals the API server alone and waits. Past the deadline, SIGKILL goes to all that it ever started, also to processes
that made a session of their own. They are found through their living parents, so the tree is recorded from time to time.
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

# The process appends to its log itself: a pipe with a reader in guard would kill the process whenever guard dies. The file is
# kept small by copying and truncating it ("copytruncate"). Output between the last read and the truncation is lost: usually
# that of a few microseconds, on busy cores of a few milliseconds, once for every 64 MiB.
LARGEST_BYTES = 64 << 20
KEPT = 3
BLOCK_BYTES = 1 << 20
NEW_LIFE = b"plimsoll: the engine is started anew\n"


def open_log(path: Path) -> int:
    """Opens a file for appending that this user alone can read; OSError where it is no plain file or cannot be opened.

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
    with contextlib.suppress(OSError):  # a full disk does not stop the start
        if os.fstat(descriptor).st_size:
            os.write(descriptor, b"\n" + NEW_LIFE)
    return descriptor


def rotate(path: Path, largest_bytes: int = LARGEST_BYTES, kept: int = KEPT) -> bool:
    """Keeps a log that is too large as NAME.1, older ones as NAME.2 and so on; True if it was too large.

    OSError where there is no room: then the log itself is unchanged.
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
            shutil.copyfileobj(log, target, BLOCK_BYTES)  # output that came meanwhile
            target.flush()
            os.ftruncate(source, 0)
    finally:
        os.close(source)
    return True


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yields a new file of this user alone, never a link or a file that somebody has open; deleted if the block fails."""
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
    """Record of a process that guard started, by which guard finds it again after it was killed itself."""

    pid: Number
    start_ticks: Number
    session: Number
    command: str  # a hash: the words may hold a secret
    boot: str
    asked: bool = False  # whether it was told to stop
    kin: tuple[tuple[Number, Number], ...] = ()  # marks of all that it had started at the last look
    leaders: tuple[tuple[Number, Number], ...] = ()  # those of them that made a session of their own, which outlives them
    cgroup: str = ""

    @property
    def mark(self) -> Mark:
        """The process's pid and start: together they never mean another process."""
        return self.pid, self.start_ticks


def command_mark(command: Sequence[str]) -> str:
    """Returns a hash of the command's words."""
    return hashlib.sha256("\0".join(command).encode("utf-8", "surrogateescape")).hexdigest()


def read_state(path: Path) -> ProcessRecord | None:
    """Reads the state file; None where there is none, ValueError where it is damaged, OSError where it cannot be read."""
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
    """Writes the state file completely or not at all, and syncs it to the disk; OSError where that fails."""
    kept = msgspec.structs.replace(state, kin=state.kin[:MOST_KIN], leaders=state.leaders[:MOST_KIN])
    with _new_file(path.with_name(f".{path.name}.new")) as (fresh, file):
        file.write(msgspec.json.encode(kept) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        fresh.replace(path)
    sync_folder(path.parent)


EXEC_LIMIT_S = 10.0
# Waits for one letter on stdin, which comes once guard has recorded this process, and becomes the command; if guard dies
# before that, it ends: there is never an engine without a record. A number on the other descriptor says why it could not.
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
    """Starts the command and returns its process; `write_down` gets the pid before the command runs.

    OSError where it cannot be started, or `write_down` raised one: then there is no process.
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
        # The exec closes the other end; a number there says why it failed.
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
NOTE_EVERY_S = 10.0  # how old the record of the tree may be
ORPHANS_S = 5.0  # time for Python's resource tracker, which cleans up after the API server has ended
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
        """`cgroup_parent`: a control group (v2) that guard may make its own in; without one only the process tree counts."""
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
        """True if the API server lives; None where the state file cannot be trusted, or names another command's process."""
        how = await self._seen()
        if how == OURS and time.monotonic() - self._noted_s > NOTE_EVERY_S:
            await asyncio.to_thread(self._note)
        return {OURS: True, GONE: False}.get(how)

    async def pids(self) -> tuple[int, ...]:
        """Returns the API server's pid, then those of all it started; only what it left behind once it has ended."""
        if await self._seen() == OURS:
            await asyncio.to_thread(self._note)
        found = [process.pid for process in await asyncio.to_thread(self._family)]
        first = self._started.pid if self._started else 0
        return tuple(sorted(found, key=lambda pid: (pid != first, pid)))

    async def last_exit(self) -> Outcome:
        """Returns how it ended: failed if it has not, else done with `asked`, and `exit_code` of this guard's own child.

        An exit code of 0 without a stop is a crash all the same.
        """
        how = await self._seen()
        if how != GONE or self._started is None:
            return failed("it has not ended" if how == OURS else "nothing is known of it")
        facts = self._exit_facts()
        asked = "as it was asked to" if self._started.asked else "without having been asked to"
        code = f"with exit code {facts['exit_code']}" if "exit_code" in facts else "with an exit code that nobody saw"
        return done(f"it ended {asked}, {code}", **facts)

    async def start(self) -> Outcome:
        """Starts it; refused while the old one, or anything that it left, still lives."""
        async with self._lock:
            self._is_starting = True
            try:
                return await asyncio.to_thread(self._start)
            finally:
                self._is_starting = False

    async def stop(self, deadline_s: float) -> Outcome:
        """Sends SIGTERM to the API server alone; past the deadline SIGKILL to all of it, which may take 15 s more."""
        async with self._lock:
            how = self._look()
            if how in (OTHER, UNKNOWN):
                return failed(self._why_not(how))
            if how == GONE:
                return self._stopped("none", await self._kill_all(), was_running=False)
            assert self._pidfd is not None
            await asyncio.to_thread(self._note, asked=True)
            try:
                # A second SIGTERM, from a guard that was killed after the first, changes nothing for vLLM.
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

    async def rotate_log(self) -> None:
        """Keeps the log small, unless there is no room for a copy; call it from time to time."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(rotate, self._log_path, self._log_bytes)

    async def _seen(self) -> str:
        """Returns the process's state, after any start that is under way: a start changes the pidfd that is held."""
        if self._is_starting:
            async with self._lock:
                return self._look()
        return self._look()

    def _look(self) -> str:
        if self._pidfd is not None:
            if not _has_ended(self._pidfd):
                return OURS
            if self._child:
                self._child.poll()  # reaped, so that no zombie stays
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
        # The pid is looked up after the pidfd is open: it cannot be reused in between.
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
        """Records the processes that belong to it now; keeps the record in memory if it cannot be written."""
        with self._noting:  # a look and a stop may call this at once
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
        group = ""  # the process's own control group; without one the process tree counts
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
        """Kills the whole tree; returns how many were killed, and how many still live."""
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
        """Kills just these, not a process that has one of their pids by now: opens each one's pidfd before a second look."""
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
    """True if the process has ended: its pidfd is readable from then on, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _remove_group(group: str) -> None:
    if group:
        with contextlib.suppress(OSError):
            Path(group).rmdir()
