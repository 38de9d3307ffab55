"""Saves evidence before guard stops an engine, in its own folder, redacted like a ticket's archive.

The log's tail, its pages, the state of its processes, their Python stacks (py-spy, from outside and without stopping them), the
GPUs. All within fifteen seconds; CONTENTS.txt names what was not available. Nothing here may prevent a restart: nothing raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from plimsoll.doctor.read.bundle import CONTENTS, ExcerptLimits, TextFile, write_text
from plimsoll.doctor.read.redact_text import shown_json, shown_line
from plimsoll.errors import PlimsollError
from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.adapters.own_process import NEW_LIFE
from plimsoll.guard.adapters.run_command import in_thread, run_command, small_environment
from plimsoll.guard.daemon.safe_log import safe_lines
from plimsoll.redaction import redact_words

MOST_PROCESSES = 64
MOST_THREADS = 128
FILE_BYTES = 64 << 10


def describe_processes(pids: Iterable[int], proc: Path = Path("/proc")) -> bytes:
    """Returns the kernel's view of these processes as one text: state, limits, and where each thread waits."""
    lines: list[str] = []
    for pid in list(pids)[:MOST_PROCESSES]:
        folder = proc / str(pid)
        words = _read(folder / "cmdline").rstrip("\0").split("\0")
        lines += [f"=== pid {pid}", f"command: {' '.join(redact_words(words))}"]
        for name in ("status", "wchan", "stack", "cgroup", "oom_score", "io"):
            text = _read(folder / name).strip()
            lines.append(f"--- {name}: {text}" if "\n" not in text else f"--- {name}\n{text}")
        with contextlib.suppress(OSError):
            threads = sorted((folder / "task").iterdir(), key=lambda one: one.name.rjust(10))
            lines.append(f"--- {len(threads)} threads: number, name, state, where it waits")
            for thread in threads[:MOST_THREADS]:
                state = "".join(_read(thread / "stat").rpartition(")")[2].split()[:1])
                lines.append(f"{thread.name} {_read(thread / 'comm').strip()} {state} {_read(thread / 'wchan').strip()}")
        lines.append("")
    return "\n".join(lines).encode("utf-8", "replace")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace")
    except OSError as problem:
        return f"cannot be read ({problem.strerror})"


# A log is split into process lives only after redaction: a line in a user's text may look like the start of a life.
LOOK_BACK_BYTES = 64 << 20
PREAMBLE_BYTES = 16 << 10
BLOCK_BYTES = 1 << 20
_OVERLAP_BYTES = 4 << 10
_MARK = re.compile(rb"(?m)^" + re.escape(NEW_LIFE.strip()) + rb"\r?$")
_BANNER = re.compile(
    "(?m)^[^\n]*(?:[█▀▄] {1,4}version |vLLM API server version |vLLM server version )[^\n]*$".encode()
)  # by which vLLM introduces itself
_LEFT_OUT = re.compile(rb"(?m)^\[plimsoll left out about [0-9,]+ bytes here\]$")


def last_life(shown: bytes, path: str, head_bytes: int, tail_bytes: int) -> int:
    """Returns the offset of the last process's life in the redacted log; 0 if the whole log is its."""
    marks = [found.start() for found in _MARK.finditer(shown)] or [found.start() for found in _BANNER.finditer(shown)]
    begins = marks[-1] if marks else 0
    gap = max((found.start() for found in _LEFT_OUT.finditer(shown)), default=0)
    if gap > begins and _begins_between(Path(path), head_bytes, tail_bytes):
        return gap
    # A little text before a lone banner belongs to the start of that life.
    return begins if len(marks) > 1 or begins > PREAMBLE_BYTES or _MARK.match(shown, begins) else 0


def _begins_between(path: Path, head_bytes: int, tail_bytes: int) -> bool:
    """True if a life begins in the omitted middle of the log."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2) - tail_bytes
            at = max(head_bytes, end - LOOK_BACK_BYTES)
            while at < end:
                file.seek(at)
                block = file.read(min(BLOCK_BYTES, end - at) + _OVERLAP_BYTES)
                if not block:
                    return False
                if _MARK.search(block) or _BANNER.search(block):
                    return True
                at += BLOCK_BYTES
    except OSError:
        return False
    return False


DEATH_BYTES = 256 << 10
DEATHS = (
    b"EngineCore encountered a fatal error", b"EngineDeadError", b"AsyncLLM output_handler failed", b"died unexpectedly",
    b"Segmentation fault", b"Fatal Python error",
)  # fmt: skip
FAILURES = (
    (rb"OutOfMemoryError|CUDA out of memory", "out of device memory"), (rb"illegal memory access", "illegal memory access"),
    (rb"device-side assert", "device-side assert"), (rb"Segmentation fault|exit code: -11", "SIGSEGV"),
    (rb"exit code: -6", "SIGABRT"), (rb"NCCL error|ncclUnhandled|ncclSystemError", "collectives"),
)  # fmt: skip


_NUMBERS = {
    name.encode(): re.compile(rb"\b" + name.encode() + rb"=(\d{1,9})\b")
    for name in ("max_tokens", "logprobs", "prompt_logprobs")
}
_SHAPE = rb"prompt \d{1,9}(?:, (?:max_tokens|logprobs|prompt_logprobs|items) \d{1,9}|, lora|, structured)*"
_GATE_SHAPES = re.compile(rb"plimsoll: the engine died with \d{1,9} requests begun: (" + _SHAPE + rb"(?:; " + _SHAPE + rb")*)")


class LogDeath(NamedTuple):
    """The end of an engine by its log: only words that are known here and numbers, never a line of the log."""

    line: str = ""  # vLLM's own words for it
    failure: str = ""  # the kind of failure
    requests: str = ""  # the shapes of the requests that the engine had begun, separated by "; "


def begun_requests(life: bytes) -> str:
    """Returns the shapes of the requests that an engine had begun when it died, by its gate or vLLM's dump of its last step."""
    if said := _GATE_SHAPES.findall(life):
        return str(said[-1].decode())
    _, is_there, dump = life.rpartition(b"Dumping scheduler output for model execution: ")
    shapes = []
    for request in dump.split(b"NewRequestData(")[1:] if is_there else ():
        about, _, _ = request.partition(b"NewRequestData(")
        length = re.search(rb"prompt_token_ids_len=(\d{1,9})\b", about[:400])
        if length is not None:
            numbers = [(name, found) for name, pattern in _NUMBERS.items() if (found := pattern.search(about))]
            words = [f"prompt {int(length[1])}", *(f"{name.decode()} {int(found[1])}" for name, found in numbers)]
            is_media = re.search(rb"mm_features=\[(?!\])", about)
            words += [f"items {max(1, about.count(b'MultiModalFeatureSpec('))}"] if is_media else []
            words += ["lora"] if b"lora_request=LoRARequest" in about else []
            words += ["structured"] if b"structured_outputs=StructuredOutputsParams" in about else []
            shapes.append(", ".join(words))
    return "; ".join(sorted(shapes)[:32])


def death_in_log(path: str) -> LogDeath:
    """Reads the end of the last life in a log; empty where the log shows none."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - DEATH_BYTES))
            tail = file.read(DEATH_BYTES)
    except OSError:
        return LogDeath()
    begins = [match.start() for pattern in (_MARK, _BANNER) for match in pattern.finditer(tail)]
    life = tail[max(begins, default=0) :]
    line = next((words.decode() for words in DEATHS if words in life), "")
    if not line:
        return LogDeath()
    failure = next((name for pattern, name in FAILURES if re.search(pattern, life)), "")
    return LogDeath(line, failure, begun_requests(life))


TOTAL_LIMIT_S = 15.0
CLOSE_LIMIT_S = 3.0  # beyond the limit, for CONTENTS.txt
STACKS_LIMIT_S = 6.0
CARDS_LIMIT_S = 8.0
LOG_HEAD_BYTES = 256 << 10
LOG_TAIL_BYTES = 2 << 20
PAGE_BYTES = 4 << 20
MOST_FOLDERS = 20
MOST_BYTES = 256 << 20
MOST_STACKS = 16
LOG = "engine.log"
EARLIER = ".earlier-lives.log"  # hidden: doctor skips such files
_OURS = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9_.-]{1,120}")

Fetch = Callable[[], Awaitable[bytes]]


class EvidenceSources(NamedTuple):
    """Sources of one engine's evidence."""

    log_path: str | None = None
    pids: tuple[int, ...] = ()
    pages: Mapping[str, bytes | Fetch] = {}  # by the file's name: "metrics.txt", "state.json", "memory.json"


class EvidenceStore:
    """Keeps evidence folders within a number and a size; the oldest are removed."""

    def __init__(
        self,
        root: Path,
        *,
        most_folders: int = MOST_FOLDERS,
        most_bytes: int = MOST_BYTES,
        limit_s: float = TOTAL_LIMIT_S,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._limit_s, self._now = root, limit_s, now
        self._most_folders, self._most_bytes = most_folders, most_bytes
        self._path = environ.get("PATH", os.defpath)
        self.label = f"evidence under {root}"

    async def take(self, engine: str, action: str, wanted: EvidenceSources) -> Outcome:
        """Saves a folder, named in `facts["folder"]`; for the same action always the same one.

        `facts["parts"]` and `facts["missing"]` count. Never raises; failed only without a folder to write to.
        """
        end = asyncio.get_running_loop().time() + self._limit_s
        try:
            async with asyncio.timeout_at(end):
                folder, is_old = await in_thread(lambda: self._folder(engine, action))
        except TimeoutError:
            return failed(f"no evidence saved: {self._root} does not answer")
        except Exception as problem:  # whatever it is: a restart does not depend on evidence
            return failed(f"no evidence saved: {self._root}: {getattr(problem, 'strerror', None) or type(problem).__name__}")
        if is_old:
            return done("evidence of this action already saved", folder=str(folder))
        taking = _EvidenceFolder(folder, self._path, shown_line(engine)[:100], shown_line(action)[:100])
        try:
            async with asyncio.timeout_at(end):
                await asyncio.gather(*taking.parts(wanted))
        except TimeoutError:
            taking.note(f"time limit of {self._limit_s:g} s reached")
        except Exception as problem:  # as above
            taking.note(f"interrupted ({type(problem).__name__})")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await in_thread(taking.close)
                await in_thread(lambda: self._make_room(folder.name))
        says = f"{len(taking.found)} part(s) saved" + (f", {len(taking.missing)} not" if taking.missing else "")
        return done(says, folder=str(folder), parts=len(taking.found), missing=len(taking.missing))

    def _folder(self, engine: str, action: str) -> tuple[Path, bool]:
        """Returns the action's folder, and whether it is complete already."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        what = self._root.lstat()
        if not stat.S_ISDIR(what.st_mode) or what.st_uid != os.geteuid() or what.st_mode & 0o022:
            raise OSError(1, "it is no folder of this user alone")
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{engine[-60:]}-{action[-50:]}")
        for known in self._folders():
            if known.name.partition("-")[2] == name:
                return known, (known / CONTENTS).exists()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        self._make_room("", spare=1)
        folder = self._root / f"{stamp}-{name}"
        folder.mkdir(mode=0o700)
        return folder, False

    def _folders(self) -> list[Path]:
        found = (Path(entry.path) for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False))
        return sorted(path for path in found if _OURS.fullmatch(path.name))

    def _make_room(self, keep: str, spare: int = 0) -> None:
        folders = self._folders()
        sizes = dict.fromkeys(folders, 0)
        for path in folders:
            with contextlib.suppress(OSError):
                sizes[path] = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
        for path in folders:
            is_room = len(sizes) + spare <= self._most_folders and sum(sizes.values()) <= self._most_bytes
            if is_room or path.name == keep:
                break
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]


class _EvidenceFolder:
    """One evidence folder being written."""

    def __init__(self, folder: Path, path: str, engine: str, action: str) -> None:
        self._folder, self._path = folder, path
        self._title = f"Evidence of {engine}, action {action}"
        self.found: list[str] = []
        self.missing: list[str] = []

    def parts(self, wanted: EvidenceSources) -> Iterable[Awaitable[None]]:
        if wanted.log_path is not None:
            yield self._log(wanted.log_path)
        else:
            self.note(f"{LOG}: log path unknown")
        for name, page in wanted.pages.items():
            yield self._page(name, page)
        if wanted.pids:
            yield self._page("processes.txt", lambda: in_thread(lambda: describe_processes(wanted.pids)))
            yield self._stacks(wanted.pids)
        else:
            self.note("processes.txt, stacks.txt: processes unknown")
        yield self._cards()

    def note(self, why: str) -> None:
        self.missing.append(shown_line(why))

    def close(self) -> None:
        """Writes CONTENTS.txt last: a folder with it is complete."""
        lines = [self._title, "", "Secrets were replaced by [redacted], users' text by [hidden]; no rule finds everything.", ""]
        lines += [f"  {name}" for name in sorted(self.found)]
        lines += ["", "Not available:", *(f"  {why}" for why in self.missing)] if self.missing else []
        _write(self._folder / CONTENTS, "\n".join(lines).encode("utf-8", "replace") + b"\n")

    async def _log(self, path: str) -> None:
        try:
            self.found += await in_thread(lambda: self._write_log(path))
        except (PlimsollError, OSError) as problem:
            self.note(f"{LOG}: {problem}")

    def _write_log(self, path: str) -> list[str]:
        """Writes the log, and earlier lives to a file that doctor does not read; no file ever holds possible users' text."""
        file = io.BytesIO()
        # The start is short and says how the engine was set up; the end says what happened.
        write_text(TextFile(path), file, ExcerptLimits(LOG_HEAD_BYTES, LOG_TAIL_BYTES))
        redacted = file.getvalue()
        lines = redacted.decode("utf-8", "replace").removesuffix("\n").split("\n")
        shown = "".join(safe_lines(lines, begun_requests(redacted))).encode()
        begins = last_life(shown, path, LOG_HEAD_BYTES, LOG_TAIL_BYTES)
        _write(self._folder / LOG, shown[begins:])
        if not begins:
            return [LOG]
        _write(self._folder / EARLIER, shown[:begins])
        return [LOG, EARLIER]

    async def _page(self, name: str, page: bytes | Fetch) -> None:
        try:
            data = page if isinstance(page, bytes) else await page()
        except Exception as problem:  # the engine may hang or be gone
            why = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            return self.note(f"{name}: {why}")
        if not data:
            return self.note(f"{name}: no answer")
        return await self._keep(name, data[:PAGE_BYTES])

    async def _stacks(self, pids: tuple[int, ...]) -> None:
        # If plimsoll is called by its full path, its environment's programs are not in PATH.
        program = shutil.which("py-spy", path=self._path) or shutil.which(Path(sys.executable).with_name("py-spy"))
        if program is None:
            return self.note("stacks.txt: py-spy is not installed (plimsoll-line[evidence])")
        texts = await asyncio.gather(*(self._stack(program, pid) for pid in pids[:MOST_STACKS]))
        data = b"\n".join(text for text in texts if text)
        return await self._keep("stacks.txt", data) if data else None

    async def _stack(self, program: str, pid: int) -> bytes:
        # Without --nonblocking py-spy stops the process while it looks.
        words = [program, "dump", "--nonblocking", "--pid", str(pid)]
        ran = await run_command(words, STACKS_LIMIT_S, small_environment(), keep_bytes=1 << 20)
        if ran.code != 0:
            self.note(f"stacks.txt: pid {pid}: {ran.trouble or ran.last_line[:200] or f'py-spy ended with {ran.code}'}")
            return b""
        return f"# pid {pid}\n".encode() + ran.output

    async def _cards(self) -> None:
        program = shutil.which("nvidia-smi", path=self._path)
        if program is None:
            return self.note("nvidia-smi.txt: no nvidia-smi on this host")
        ran = await run_command([program, "-q"], CARDS_LIMIT_S, small_environment(), keep_bytes=PAGE_BYTES)
        if ran.code is None or not ran.output:
            return self.note(f"nvidia-smi.txt: {ran.trouble or 'no output'}")
        return await self._keep("nvidia-smi.txt", ran.output)

    async def _keep(self, name: str, content: bytes) -> None:
        try:
            await in_thread(lambda: self._write(name, content))
        except (PlimsollError, OSError) as problem:
            return self.note(f"{name}: {problem}")
        return self.found.append(name)

    def _write(self, name: str, content: bytes) -> None:
        target = self._folder / (re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".") or "unnamed")
        if name.endswith(".json") and (text := shown_json(content)) is not None:
            return _write(target, text.encode("utf-8", "replace"))
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w+b") as file:
            write_text(content, file, ExcerptLimits(0, PAGE_BYTES))
        return None


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
