"""Writes one archive for a ticket: every secret and every user's text in it hidden, with a list of what is inside.

    write_bundle("case.tar.zst", parts, made_with="plimsoll 1.0")

The archive appears whole or not at all, and the same parts give the same bytes. Nothing is written but the file that was named
and, beside it, nameless or temporary files on the way there.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import re
import resource
import signal
import stat
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

import zstandard

from plimsoll import __version__
from plimsoll.doctor.read.redact_text import LineSplitter, shown_json, shown_line, shown_text
from plimsoll.doctor.words import words
from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.net.inputs import BLOCK_BYTES, Budget, Descriptor, InputKind, is_plain, kind_of, text_blocks
from plimsoll.redaction import hide_homes, redact


class TextFile(NamedTuple):
    """A text that lies in a file, plain or packed; it is read when the archive is written."""

    path: str


Content = bytes | TextFile


class ArchivePart(NamedTuple):
    """One member to be."""

    name: str  # as it will be called, "logs/server.log"; made harmless before it is used
    kind: str  # "text" or "json"
    what: str  # one sentence
    content: Content


class ArchiveMember(NamedTuple):
    """One member as it was written."""

    name: str  # inside the archive's folder
    size_bytes: int
    what: str
    note: str = ""  # what was left out of it
    start: int = 0  # where its text lies in the spool


class Archive(NamedTuple):
    """An archive that is there."""

    path: str
    size_bytes: int
    members: tuple[ArchiveMember, ...]
    left_out: tuple[str, ...]


# Only plain files are opened, packed ones are unpacked, and what is no text is refused: a memory snapshot is never copied.
HEAD_BYTES = 8 << 20
TAIL_BYTES = 24 << 20
CONTEXT_BYTES = 256 << 10  # read before the tail, so that what began there is known; never written
UNPACKED_MAX_BYTES = 4 << 30
_SAMPLE_BYTES = 64 << 10


class ExcerptLimits(NamedTuple):
    """How much of a text is kept."""

    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES


class TextExcerpt(NamedTuple):
    """The blocks that are kept of a text, as UTF-8."""

    head: list[bytes]
    tail: list[bytes]  # begins with `context_bytes` that are not to be written; empty where the head is all
    context_bytes: int
    left_out_bytes: int


def kept(content: Content, limits: ExcerptLimits = ExcerptLimits()) -> TextExcerpt:  # noqa: B008
    """The parts of a text that are kept; BadInput where it is no text."""
    if isinstance(content, bytes):
        return _kept(_text_blocks(io.BytesIO(content)), limits)
    try:
        descriptor = os.open(content.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        raise BadInput(f"could not be opened: {getattr(problem, 'strerror', None) or 'not a file name'}") from None
    try:
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadInput("not a plain file")
        whole = limits.head_bytes + limits.tail_bytes + CONTEXT_BYTES
        if size <= whole or not is_plain(os.pread(descriptor, _SAMPLE_BYTES, 0)):
            return _kept(_text_blocks(Descriptor(descriptor, Budget())), limits)
        start = os.pread(descriptor, max(limits.head_bytes, _SAMPLE_BYTES), 0)
        head = b"".join(_text_blocks(io.BytesIO(start)))[: limits.head_bytes]
        begin = size - limits.tail_bytes - CONTEXT_BYTES
        tail = [os.pread(descriptor, BLOCK_BYTES, at) for at in range(begin, size, BLOCK_BYTES)]
        return TextExcerpt([head], tail, CONTEXT_BYTES, size - limits.tail_bytes - limits.head_bytes)
    except OSError as problem:
        raise BadInput(f"could not be read: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def _text_blocks(raw: BinaryIO | io.RawIOBase) -> Iterator[bytes]:
    """The text in it; what is binary is refused here also where a log with as many NUL bytes would be read."""
    try:
        for number, block in enumerate(text_blocks("", raw, Budget(), UNPACKED_MAX_BYTES)):
            sample = block[:_SAMPLE_BYTES]
            if number == 0 and (kind_of(sample) is InputKind.SNAPSHOT or sample.count(0) > 0.2 * len(sample)):
                raise BadInput("")
            yield block
    except BadInput:
        raise BadInput("not text; what is binary is never copied") from None


def _kept(blocks: Iterator[bytes], limits: ExcerptLimits) -> TextExcerpt:
    head: list[bytes] = []
    tail: deque[bytes] = deque()
    in_head = in_tail = dropped = 0
    for block in blocks:
        first = block[: limits.head_bytes - in_head]
        head.append(first)
        in_head += len(first)
        tail.append(block[len(first) :])
        in_tail += len(tail[-1])
        while in_tail - len(tail[0]) >= limits.tail_bytes + CONTEXT_BYTES:
            dropped += len(tail[0])
            in_tail -= len(tail.popleft())
    if not dropped:
        return TextExcerpt([*head, *tail], [], 0, 0)
    context = max(0, in_tail - limits.tail_bytes)
    return TextExcerpt(head, list(tail), context, dropped + context)


CONTENTS = "CONTENTS.txt"
MOST_PARTS = 500
MOST_BYTES = 512 << 20  # in all members together
_LARGEST_JSON = 16 << 20
_ZSTD_LEVEL = 10
_ENDINGS = (".tar.zst", ".tar.gz", ".tgz", ".tar")


_HIDDEN = """\
Secrets (tokens, keys, passwords) in here were replaced by [redacted], and what users wrote and models answered
by [hidden]; home folders are shown as ~. No rule finds everything: look through it before you send it.
"""


def write_bundle(
    path: str, parts: Iterable[ArchivePart], *, made_with: str, at: int = 0, force: bool = False, left_out: Iterable[str] = ()
) -> Archive:
    """Write the archive; `at` is the time (seconds since 1970) its members bear, `left_out` what the caller did not give.

    BadInput where the file is there already (unless `force`) or cannot be written by that name.
    """
    target = _checked(path, force=force)
    missing = [shown_line(reason) for reason in left_out]
    try:
        with tempfile.TemporaryFile(dir=target.parent) as spool:
            found = _spooled(parts, spool, missing)
            listing = "".join(
                f"  {member.name}  {member.size_bytes:,} bytes\n"
                f"      {member.what}{f' ({member.note})' if member.note else ''}\n"
                for member in found
            )
            left = "".join(f"  {reason}\n" for reason in missing)
            contents = (
                f"{shown_line(target.name)}, made with {shown_line(made_with)}\n\n{_HIDDEN}\nWhat is in it:\n{listing}"
                + (f"\nWhat is not in it:\n{left}" if left else "")
            ).encode()
            listed = ArchiveMember(CONTENTS, len(contents), "", start=spool.tell())
            spool.write(contents)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".plimsoll-", suffix=".part")
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    _pack(file, target.name, [listed, *found], spool, at)
                    file.flush()
                    size = os.fstat(file.fileno()).st_size
                if force:
                    Path(temporary).replace(target)
                else:
                    _link(Path(temporary), target)
            finally:
                Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise WorldFailed(f"{path}: cannot be written: {error.strerror or error}") from None
    return Archive(path, size, tuple(found), tuple(missing))


def _checked(path: str, *, force: bool) -> Path:
    if "\0" in path or not path.endswith(_ENDINGS) or Path(path).name in _ENDINGS:
        raise BadInput(f"{path!r}: name the archive .tar.zst, .tar.gz or .tar")
    target = Path(path)
    try:
        what = target.lstat()
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise BadInput(f"{path}: no such folder") from None
        return target
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if not force:
        raise BadInput(f"{path}: already there; choose another name, or --force replaces it")
    if not stat.S_ISREG(what.st_mode):
        raise BadInput(f"{path}: not a plain file; it is not replaced")
    return target


def _link(temporary: Path, target: Path) -> None:
    """Give the finished file its name; one that came meanwhile is not replaced."""
    taken = BadInput(f"{target}: already there; choose another name, or --force replaces it")
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise taken from None
    except OSError:  # a file system without links
        if target.exists():
            raise taken from None
        temporary.replace(target)


def _spooled(parts: Iterable[ArchivePart], spool: IO[bytes], missing: list[str]) -> list[ArchiveMember]:
    """Every part as it will be shown, one after the other; what cannot be is added to what is missing."""
    found: list[ArchiveMember] = []
    taken = {CONTENTS.casefold()}
    for part in parts:
        shown = shown_line(_base(part.name))
        start = spool.tell()
        if len(found) >= MOST_PARTS or start >= MOST_BYTES:
            missing.append(f"{shown}: the archive is full")
            continue
        try:
            is_json = part.kind == "json" and isinstance(part.content, bytes) and len(part.content) <= _LARGEST_JSON
            facts = shown_json(part.content) if is_json and isinstance(part.content, bytes) else None
            note = "" if facts is not None else write_text(part.content, spool)
            spool.write((facts or "").encode("utf-8", "replace"))
        except PlimsollError as problem:
            spool.seek(start)
            spool.truncate()
            missing.append(f"{shown}: {shown_line(str(problem))}")
            continue
        came_from = f"from {shown_line(_base(part.content.path))}" if isinstance(part.content, TextFile) else ""
        note = "; ".join(piece for piece in (came_from, note) if piece)
        # A name that is harmless on every system, and this member's alone.
        named = shown_line(part.name).replace("\\", "/")
        pieces = [_harmless(piece) for piece in named.split("/") if piece not in ("", ".", "..", "~")][-3:] or ["unnamed"]
        if isinstance(part.content, TextFile):
            pieces[-1] = re.sub(r"(?<=.)\.(?:gz|zst|zstd)$", "", pieces[-1])
        stem, dot, ending = pieces[-1].rpartition(".") if "." in pieces[-1][1:] else (pieces[-1], "", "")
        name, count = "/".join(pieces), 1
        while name.casefold() in taken:
            count += 1
            name = "/".join([*pieces[:-1], f"{stem}-{count}{dot}{ending}"])
        taken.add(name.casefold())
        found.append(ArchiveMember(name, spool.tell() - start, shown_line(part.what), note, start))
    return found


def _base(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or "unnamed"


def write_text(
    content: Content,
    spool: IO[bytes],
    limits: ExcerptLimits = ExcerptLimits(),  # noqa: B008
) -> str:
    """Write what may be shown of a text, in bounded memory; what was left out of it."""
    text = kept(content, limits)
    lines = LineSplitter()
    notes = []
    for shown in shown_text(lines.of(text.head), is_cut=bool(text.left_out_bytes)):
        spool.write(shown.encode("utf-8", "replace"))
    if text.left_out_bytes:
        spool.write(f"\n[plimsoll left out about {text.left_out_bytes:,} bytes here]\n".encode())
        context, size = 1, text.context_bytes
        for block in text.tail:
            context += block.count(b"\n", 0, max(0, size))
            size -= len(block)
        for shown in shown_text(lines.of(text.tail), context=context):
            spool.write(shown.encode("utf-8", "replace"))
        kept_of = f"the first {limits.head_bytes >> 20} MiB and the last {limits.tail_bytes >> 20} MiB"
        notes.append(f"only {kept_of} are here, about {text.left_out_bytes:,} bytes between them were left out")
    if lines.cut:
        notes.append(f"{lines.cut} very long lines were cut")
    return "; ".join(notes)


def _harmless(piece: str) -> str:
    piece = re.sub(r"[^A-Za-z0-9._-]{1,200}", "_", piece)
    return re.sub(r"^[.-]{1,9}", "_", piece)[-80:] or "_"


def _pack(file: IO[bytes], name: str, members: list[ArchiveMember], spool: IO[bytes], at: int) -> None:
    folder = _harmless(next(name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)))
    stream = file
    if name.endswith(".zst"):
        stream = cast("IO[bytes]", zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(file, closefd=False))
    elif name.endswith("gz"):
        stream = cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=at))
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            entry = tarfile.TarInfo(f"{folder}/{member.name}")
            entry.size, entry.mtime, entry.mode = member.size_bytes, at, 0o644
            spool.seek(member.start)
            archive.addfile(entry, spool)
    if stream is not file:
        stream.close()


NVIDIA_SMI = ("nvidia-smi",)
_SMI_SECONDS = 10.0
_SMI_BYTES = 256 << 10
_FILE_BYTES = 64 << 10
_MOST_LEVELS = 16
_MACHINE = words("names")["machine"]


def collect_here(
    root: Path = Path("/"), *, nvidia_smi: Sequence[str] = NVIDIA_SMI, wait_s: float = _SMI_SECONDS
) -> list[ArchivePart]:
    """Facts about this machine, as parts of an archive; `root` is where its /proc, /sys, /etc and /dev are."""
    soft, hard = ("unlimited" if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    shm: object = "not there"
    with suppress(OSError):
        found = os.statvfs(root / "dev/shm")
        shm = {"size_bytes": found.f_frsize * found.f_blocks, "free_bytes": found.f_frsize * found.f_bavail}
    limits = {"locked_memory_bytes": {"soft": soft, "hard": hard}, "dev_shm": shm}
    entries = _file_start(root / "proc/self/cgroup").splitlines()[:64] or ["0::/", "1:memory:/"]
    cgroup: list[str] = []
    for number, controllers, path in (entry.split(":", 2) for entry in entries if entry.count(":") >= 2):
        if number == "0" and not controllers:
            cgroup += _levels(root / "sys/fs/cgroup", path, _MACHINE["cgroup"])
        elif "memory" in controllers.split(","):
            cgroup += _levels(root / "sys/fs/cgroup/memory", path, _MACHINE["cgroup_v1"])
    parts = (
        ("versions.json", "Versions of plimsoll, Python, the system and packages beside plimsoll.", _versions(root)),
        ("nvidia-smi.txt", "The output of nvidia-smi.", _smi(nvidia_smi, wait_s)),
        ("meminfo.txt", "The host's memory.", _file_start(root / "proc/meminfo") or "/proc/meminfo: not there\n"),
        ("cgroup.txt", "Memory limits and events of the control groups plimsoll runs in.",
         "\n".join(cgroup or ["no memory control group found"]) + "\n"),
        ("limits.json", "How much memory may be locked, and the size of /dev/shm.", limits),
    )  # fmt: skip
    return [
        ArchivePart(f"machine/{name}", "text", what, hide_homes(redact(facts)).encode("utf-8", "replace"))
        if isinstance(facts, str)
        else ArchivePart(f"machine/{name}", "json", what, json.dumps(facts, indent=2).encode())
        for name, what, facts in parts
    ]


def _levels(base: Path, path: str, names: Sequence[str]) -> Iterator[str]:
    """Limits and events, from plimsoll's own control group upwards: the one that bites may be any of them."""
    pieces = [piece for piece in path.split("/") if piece not in ("", ".", "..")][:64]
    for level in range(min(len(pieces), _MOST_LEVELS) + 1):
        folder = base.joinpath(*pieces[: len(pieces) - level])
        found = [(name, " ".join(_file_start(folder / name, 4096).split())) for name in names]
        said = [f"  {name}: {value}" for name, value in found if value]
        if said:
            yield "own control group" if level == 0 else f"{level} above"
            yield from said


def _file_start(path: Path, most_bytes: int = _FILE_BYTES) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(descriptor, most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _versions(root: Path) -> dict[str, object]:
    packages: dict[str, str | None] = {}
    for name in _MACHINE["packages"]:
        try:
            packages[name] = redact(str(metadata.version(name)))[:100]
        except Exception:  # noqa: BLE001, PERF203, RUF100  (a broken installation raises anything)
            packages[name] = None
    release = dict(line.partition("=")[::2] for line in _file_start(root / "etc/os-release").splitlines() if "=" in line)
    kernel = os.uname()
    lines = _file_start(root / "proc/driver/nvidia/version").splitlines()
    return {
        "plimsoll": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": redact(release.get("PRETTY_NAME", "").strip('"'))[:200] or None,
        "kernel": f"{kernel.sysname} {kernel.release} {kernel.machine}",
        "kernel_module_nvidia": (redact(lines[0].strip())[:300] if lines else None),
        "packages": packages,
    }


def _smi(command: Sequence[str], wait_s: float) -> str:
    """The output of nvidia-smi, as far as it comes in time."""
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(  # noqa: S603
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except (OSError, ValueError):
        return f"{name}: not found on this machine\n"
    try:
        data, why = process.communicate(timeout=wait_s)[0], ""
        why = f"{name} ended with exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired as late:
        data, why = late.output or b"", f"it did not finish within {wait_s:g} s"
        with suppress(ProcessLookupError):  # with all that it started; one that the driver holds is left behind
            os.killpg(process.pid, signal.SIGKILL)
    why = "the rest of its output was left out" if len(data) > _SMI_BYTES else why
    text = data[:_SMI_BYTES].decode("utf-8", "replace").replace("\0", " ")
    return text + (f"\n[{why}]\n" if why else "")
