"""Run the commands of a page of the docs, in order, and hold what they print against what the page shows.

    python -m lab.run_page docs/tutorial.md             # exit 1 and one line that names page and line, if it is not true
    python -m lab.run_page docs/tutorial.md --write     # puts what was printed in the place of what is shown

All commands go through one bash, which begins in this repository with an empty home folder: what one command sets, leaves or
starts, the next one has. `lab/page.py` says how a page is read. Where the page ends, nothing of it may be running any more.
Whatever goes wrong, and also when the process that started this one ends, all that the page has started is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from lab.page import Command, PageError, commands_of, renewed, rewritten, swapper, told_of, wrong
from plimsoll.demo.balancer import free_port

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
Say = Callable[[str], None]


class NotTrue(Exception):
    """A page shows what is not so; the message is one line that names page and line."""


class Printed(NamedTuple):
    """What a command printed, on either stream, and how it ended."""

    text: str
    exit_code: int
    seconds: float


class Shell:
    """One bash that takes commands one after the other; its background jobs live on between them."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=folder, env=dict(environment), start_new_session=True, bufsize=0,
        )  # fmt: skip

    def run(self, text: str, limit_s: float) -> Printed:
        """To its end; TimeoutError where that does not come, EOFError where the shell itself ends."""
        assert self._process.stdin is not None
        began_s = time.monotonic()
        # `eval`, so that a mistake in the text ends the command and not the shell; its input is empty, not our next command.
        line = f"eval {shlex.quote(text)} </dev/null; printf '%s%d\\n' {self._mark} $?\n"
        self._process.stdin.write(line.encode())
        read = b""
        while (end := read.find(self._mark.encode())) < 0 or not read.endswith(b"\n"):
            read += self._piece(began_s + limit_s)
        code = int(read[end + len(self._mark) :])
        return Printed(read[:end].decode(errors="replace"), code, time.monotonic() - began_s)

    def _piece(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        parent = os.getppid()
        while time.monotonic() < deadline_s:
            if os.getppid() != parent:
                raise SystemExit(1)  # whoever started us is gone, and nobody would stop us
            if select.select([self._process.stdout], [], [], 0.5)[0]:
                if piece := self._process.stdout.read(65536):
                    return piece
                raise EOFError
        raise TimeoutError

    def close(self) -> None:
        """No more commands."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def nothing_left() -> Iterator[Callable[[], dict[int, str]]]:
    """Ends every process that began under us meanwhile, however it detached itself; gives what tells which those are."""
    before = set(_below(os.getpid()))
    _adopt_orphans(is_on=True)

    def left() -> dict[int, str]:
        return {pid: name for pid, name in _below(os.getpid()).items() if pid not in before}

    try:
        yield left
    finally:
        while running := left():
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in running:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        _adopt_orphans(is_on=False)


def _adopt_orphans(*, is_on: bool) -> None:
    """What loses its parent becomes our child, not that of the machine's first process: so it can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def _below(root: int) -> dict[int, str]:
    """Every process that descends from this one, with its command line; those that have ended and wait to be read as well."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                parents[int(entry.name)], names[int(entry.name)] = int(parent), "" if state == "Z" else title
    found: dict[int, str] = {}
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new and pid not in found}
        found |= {pid: names[pid] for pid in new}
    return found


def environment(home: Path) -> dict[str, str]:
    """Ours, as somebody has it who begins: an empty home, no settings of vLLM's or plimsoll's, this Python's programs first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PLIMSOLL_", "XDG_", "CI"))}
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    scratch = home / ".tmp"
    scratch.mkdir()
    return {
        **kept,
        "HOME": str(home),
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": caches,  # the engine is there, and nobody wants to install it twice
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "no_proxy": "*",
    }


def run_page(path: Path, *, left_out: Collection[str] = (), write: bool = False, say: Say = lambda _: None) -> None:
    """Every command but those left out; NotTrue at the first that is not as shown, unless what is printed is to be written."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    try:
        told, commands = told_of(text), commands_of(text)
    except PageError as error:
        raise NotTrue(f"{name}:{error}") from None
    if missing := set(left_out) - {command.bare for command in commands}:
        raise NotTrue(f"{name}:1: left out and not there: {sorted(missing)[0]}")
    news: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="page-") as scratch, nothing_left() as left:
        home = Path(scratch)
        ours = [(told.home, scratch), (told.checkout, str(ROOT)), *((str(port), str(free_port())) for port in told.ports)]
        to_us, to_reader = swapper(ours), swapper([(other, one) for one, other in ours if one])
        if told.home and told.checkout.startswith(told.home + "/"):
            Path(told.checkout.replace(told.home, scratch, 1)).symlink_to(ROOT)
        shell = Shell(ROOT, environment(home))
        try:
            for command in commands:
                if command.bare in left_out:
                    continue
                printed = _ran(shell, command, to_us, to_reader, f"{name}:{command.line}")
                say(f"{name}:{command.line}: {printed.seconds:.1f} s: {command.text.splitlines()[0]}")
                fault = _fault(command, printed)
                if fault and not write:
                    raise NotTrue(f"{name}:{fault[0]}: {fault[1]}; the command was: {command.text.splitlines()[0]}")
                if fault:
                    say(f"{name}:{fault[0]}: {fault[1]}")
                news[command.line] = renewed(command, printed.text)
        finally:
            if write:
                path.write_text(rewritten(text, news), encoding="utf-8")
        shell.close()
        _all_ended(left, str(name))


def _ran(shell: Shell, command: Command, to_us: Callable[[str], str], to_reader: Callable[[str], str], place: str) -> Printed:
    try:
        printed = shell.run(to_us(command.text), command.above.limit_s)
    except TimeoutError:
        raise NotTrue(f"{place}: not over after {command.above.limit_s:.0f} s: {command.text.splitlines()[0]}") from None
    except EOFError:
        raise NotTrue(f"{place}: this ended the shell: {command.text.splitlines()[0]}") from None
    return printed._replace(text=to_reader(printed.text))


def _fault(command: Command, printed: Printed) -> tuple[int, str] | None:
    if printed.exit_code != command.above.exit_code:
        last = (printed.text.strip().splitlines() or ["nothing"])[-1]
        return command.line, f"exit code {printed.exit_code}, not {command.above.exit_code}; printed last was {last[:300]!r}"
    return wrong(command, printed.text)


def _all_ended(left: Callable[[], dict[int, str]], name: str) -> None:
    """A page stops what it starts; what was told to stop is given a while."""
    deadline_s = time.monotonic() + GRACE_S
    while running := {pid: title for pid, title in left().items() if title}:
        if time.monotonic() > deadline_s:
            raise NotTrue(f"{name}: the page ends and this still runs: {'; '.join(sorted(running.values()))[:300]}")
        time.sleep(0.1)


def _stopped(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(words: Sequence[str]) -> int:
    """One page; 0 if all of it is true."""
    pages = [word for word in words if word != "--write"]
    if len(pages) != 1 or pages[0].startswith("-"):
        print("usage: python -m lab.run_page PAGE [--write]", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stopped)
    try:
        run_page(Path(pages[0]).resolve(), write="--write" in words, say=lambda text: print(text, file=sys.stderr, flush=True))
    except NotTrue as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
