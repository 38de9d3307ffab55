"""Writes one archive for a ticket: every secret and every user's text in it hidden, with a list of what is inside.

    write_bundle("case.tar.zst", parts, made_with="plimsoll 1.0")

The archive appears whole or not at all, and the same parts give the same bytes. Nothing is written but the file that was named
and, beside it, nameless or temporary files on the way there.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import platform
import re
import resource
import select
import signal
import stat
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple, cast

from plimsoll import __version__
from plimsoll.doctor.read.redact_text import LineSplitter, shown_json, shown_line, shown_text
from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.net.inputs import BLOCK_BYTES, gunzipped, recoded, unpacked_zstd
from plimsoll.redaction import hide_homes, redact


class TextFile(NamedTuple):
    """A text that lies in a file, plain or packed; it is read when the archive is written."""

    path: str


Content = bytes | TextFile | Callable[[], Iterable[bytes]]


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


class Archive(NamedTuple):
    """An archive that is there."""

    path: str
    size_bytes: int
    members: tuple[ArchiveMember, ...]
    left_out: tuple[str, ...]


_LEVEL = 10


def library() -> tuple[ModuleType, bool] | None:
    """The library, and whether it is the package."""
    for name in ("zstandard", "compression.zstd"):
        try:
            return importlib.import_module(name), name == "zstandard"
        except ImportError:
            continue
    return None


def packing(target: IO[bytes]) -> IO[bytes]:
    """A stream that packs what is written to it; closing it leaves the target open."""
    found = library()
    if found is None:
        raise BadInput("a .tar.zst needs the zstandard package: name it .tar.gz, or install plimsoll-line[doctor]")
    module, is_package = found
    if is_package:
        return cast("IO[bytes]", module.ZstdCompressor(level=_LEVEL).stream_writer(target, closefd=False))
    return cast("IO[bytes]", module.ZstdFile(target, "w", level=_LEVEL))


# Only plain files are opened, packed ones are unpacked, and what is no text is refused: a memory snapshot is never copied.
HEAD_BYTES = 8 << 20
TAIL_BYTES = 24 << 20
CONTEXT_BYTES = 256 << 10  # read before the tail, so that what began there is known; never written
UNPACKED_MAX_BYTES = 4 << 30
_SAMPLE_BYTES = 64 << 10
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PACKED = (
    b"BZh", b"\xfd7zXZ\0", b"PK\x03\x04", b"7z\xbc\xaf", b"\x04\x22\x4d\x18", b"\x80\x02", b"\x80\x03", b"\x80\x04",
    b"\x80\x05",
)  # fmt: skip
_TEXT_BYTES = bytes([0, 7, 8, 9, 10, 11, 12, 13, 27, *range(32, 127), *range(128, 256)])


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
    if isinstance(content, TextFile):
        return _kept_of_file(content.path, limits)
    blocks = _sliced(content) if isinstance(content, bytes) else (piece for some in content() for piece in _sliced(some))
    return _kept(_as_text(blocks), limits)


def _sliced(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), BLOCK_BYTES):
        yield data[at : at + BLOCK_BYTES]


def _kept_of_file(path: str, limits: ExcerptLimits) -> TextExcerpt:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        raise BadInput(f"could not be opened: {getattr(problem, 'strerror', None) or 'not a file name'}") from None
    try:
        what = os.fstat(descriptor)
        if not stat.S_ISREG(what.st_mode):
            raise BadInput("not a plain file")
        start = os.pread(descriptor, _SAMPLE_BYTES, 0)
        if (
            what.st_size > limits.head_bytes + limits.tail_bytes + CONTEXT_BYTES
            and _encoding(start) is None
            and not start.startswith((_GZIP, _ZSTD))
        ):
            head = list(_as_text(_read(descriptor, 0, limits.head_bytes)))
            from_byte = what.st_size - limits.tail_bytes - CONTEXT_BYTES
            tail = list(_read(descriptor, from_byte, what.st_size))
            return TextExcerpt(head, tail, CONTEXT_BYTES, what.st_size - limits.tail_bytes - limits.head_bytes)
        return _kept(_as_text(_read(descriptor)), limits)
    except OSError as problem:
        raise BadInput(f"could not be read: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def _read(descriptor: int, at: int = 0, end: int = 1 << 62) -> Iterator[bytes]:
    while at < end and (block := os.pread(descriptor, min(BLOCK_BYTES, end - at), at)):
        at += len(block)
        yield block


def _kept(blocks: Iterator[bytes], limits: ExcerptLimits) -> TextExcerpt:
    head: list[bytes] = []
    tail: deque[bytes] = deque()
    in_head = in_tail = dropped = 0
    for block in blocks:
        if in_head < limits.head_bytes:
            head.append(block)
            in_head += len(block)
            continue
        tail.append(block)
        in_tail += len(block)
        while in_tail - len(tail[0]) >= limits.tail_bytes + CONTEXT_BYTES:
            dropped += len(tail[0])
            in_tail -= len(tail.popleft())
    if not dropped:
        return TextExcerpt([*head, *tail], [], 0, 0)
    context = max(0, in_tail - limits.tail_bytes)
    return TextExcerpt(head, list(tail), context, dropped + context)


def _as_text(blocks: Iterator[bytes], *, is_inside: bool = False) -> Iterator[bytes]:
    """The same as UTF-8 text, unpacked once; BadInput where it is none."""
    first = next(blocks, b"")
    while len(first) < 512 and (more := next(blocks, b"")):
        first += more
    if first.startswith((_GZIP, _ZSTD)) and not is_inside:
        yield from _as_text(_capped(_unpacked(first, _chained(first, blocks))), is_inside=True)
        return
    encoding = _encoding(first[:_SAMPLE_BYTES])
    if encoding is None and not _is_text(first[:_SAMPLE_BYTES]):
        raise BadInput("not text; what is binary is never copied")
    yield from _chained(first, blocks) if encoding is None else recoded(_chained(first, blocks), encoding)


def _chained(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _capped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    total = 0
    for block in blocks:
        total += len(block)
        yield block
        if total > UNPACKED_MAX_BYTES:
            return


def _encoding(start: bytes) -> str | None:
    """Which UTF-16 this is; None for anything else. Read as UTF-8 it would hide its secrets from us, not from a reader."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = start[0:512:2], start[1:512:2]
    if len(odd) >= 8 and odd.count(0) > 0.6 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if len(odd) >= 8 and even.count(0) > 0.6 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return None


def _is_text(sample: bytes) -> bool:
    if sample.startswith((*_PACKED, _GZIP, _ZSTD)) or sample[257:262] == b"ustar":
        return False
    if sample.count(0) > 0.2 * len(sample) or len(sample.translate(None, _TEXT_BYTES)) > 0.05 * len(sample):
        return False
    return sample.decode("utf-8", "replace").count("\ufffd") <= 0.2 * len(sample)


def _unpacked(start: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    is_zstd = start.startswith(_ZSTD)
    if is_zstd and library() is None:
        raise BadInput("packed with zstd, and the zstandard package is not installed")
    with suppress(zlib.error, BadInput):  # of what cannot be unpacked nothing is kept
        yield from unpacked_zstd("", blocks) if is_zstd else gunzipped(blocks)


CONTENTS = "CONTENTS.txt"
MOST_PARTS = 500
MOST_BYTES = 512 << 20  # in all members together
_LARGEST_JSON = 16 << 20
_ENDINGS = (".tar.zst", ".tar.gz", ".tgz", ".tar")


class _SpooledMember(NamedTuple):
    """A member on its way: where its text lies in the spool."""

    member: ArchiveMember
    start: int


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
            contents = _contents(target.name, found, missing, made_with).encode()
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".plimsoll-", suffix=".part")
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    _pack(file, target.name, contents, found, spool, at)
                    file.flush()
                    size = os.fstat(file.fileno()).st_size
                _put(Path(temporary), target, force=force)
            finally:
                Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise WorldFailed(f"{path}: cannot be written: {error.strerror or error}") from None
    return Archive(path, size, tuple(one.member for one in found), tuple(missing))


def _checked(path: str, *, force: bool) -> Path:
    if "\0" in path or not path.endswith(_ENDINGS) or Path(path).name in _ENDINGS:
        raise BadInput(f"{path!r}: name the archive .tar.zst, .tar.gz or .tar")
    if path.endswith(".zst") and library() is None:
        raise BadInput(f"{path}: a .tar.zst needs the zstandard package: name it .tar.gz, or install plimsoll-line[doctor]")
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


def _put(temporary: Path, target: Path, *, force: bool) -> None:
    """Give the finished file its name; one that came meanwhile is not replaced."""
    if force:
        temporary.replace(target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise BadInput(f"{target}: already there; choose another name, or --force replaces it") from None
    except OSError:  # a file system without links
        if target.exists():
            raise BadInput(f"{target}: already there; choose another name, or --force replaces it") from None
        temporary.replace(target)


def _spooled(parts: Iterable[ArchivePart], spool: IO[bytes], missing: list[str]) -> list[_SpooledMember]:
    """Every part as it will be shown, one after the other; what cannot be is added to what is missing."""
    found: list[_SpooledMember] = []
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
        name = _member_name(part, taken)
        found.append(_SpooledMember(ArchiveMember(name, spool.tell() - start, shown_line(part.what), note), start))
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
        for shown in shown_text(lines.of(text.tail), context=_lines_in(text.tail, text.context_bytes)):
            spool.write(shown.encode("utf-8", "replace"))
        kept_of = f"the first {limits.head_bytes >> 20} MiB and the last {limits.tail_bytes >> 20} MiB"
        notes.append(f"only {kept_of} are here, about {text.left_out_bytes:,} bytes between them were left out")
    if lines.cut:
        notes.append(f"{lines.cut} very long lines were cut")
    return "; ".join(notes)


def _lines_in(blocks: list[bytes], size: int) -> int:
    count = 1
    for block in blocks:
        count += block.count(b"\n", 0, max(0, size))
        size -= len(block)
    return count


def _member_name(part: ArchivePart, taken: set[str]) -> str:
    """A name that is harmless on every system, and this member's alone."""
    name = shown_line(part.name).replace("\\", "/")
    pieces = [_harmless(piece) for piece in name.split("/") if piece not in ("", ".", "..", "~")][-3:] or ["unnamed"]
    pieces[-1] = re.sub(r"(?<=.)\.(?:gz|zst|zstd)$", "", pieces[-1]) if isinstance(part.content, TextFile) else pieces[-1]
    stem, dot, ending = pieces[-1].rpartition(".") if "." in pieces[-1][1:] else (pieces[-1], "", "")
    name = "/".join(pieces)
    count = 1
    while name.casefold() in taken:
        count += 1
        name = "/".join([*pieces[:-1], f"{stem}-{count}{dot}{ending}"])
    taken.add(name.casefold())
    return name


def _harmless(piece: str) -> str:
    piece = re.sub(r"[^A-Za-z0-9._-]{1,200}", "_", piece)
    return re.sub(r"^[.-]{1,9}", "_", piece)[-80:] or "_"


def _contents(archive: str, found: list[_SpooledMember], missing: list[str], made_with: str) -> str:
    lines = [
        f"{shown_line(archive)}, made with {shown_line(made_with)}",
        "",
        "Secrets (tokens, keys, passwords) in here were replaced by [redacted], and what users wrote and models answered",
        "by [hidden]; home folders are shown as ~. No rule finds everything: look through it before you send it.",
        "",
        "What is in it:",
    ]
    for member in (one.member for one in found):
        lines.append(f"  {member.name}  {member.size_bytes:,} bytes")
        lines.append(f"      {member.what}{f' ({member.note})' if member.note else ''}")
    if missing:
        lines += ["", "What is not in it:", *(f"  {reason}" for reason in missing)]
    return "\n".join(lines) + "\n"


def _pack(file: IO[bytes], name: str, contents: bytes, found: list[_SpooledMember], spool: IO[bytes], at: int) -> None:

    folder = _harmless(next(name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)))
    stream = _packing(file, name, at)
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member, start in [(ArchiveMember(CONTENTS, len(contents), ""), -1), *found]:
            entry = tarfile.TarInfo(f"{folder}/{member.name}")
            entry.size, entry.mtime, entry.mode = member.size_bytes, at, 0o644
            if start < 0:
                archive.addfile(entry, io.BytesIO(contents))
            else:
                spool.seek(start)
                archive.addfile(entry, spool)
    if stream is not file:
        stream.close()


def _packing(file: IO[bytes], name: str, at: int) -> IO[bytes]:
    if name.endswith(".zst"):
        return packing(file)
    if name.endswith("gz"):
        return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=at))
    return file


NVIDIA_SMI = ("nvidia-smi",)
_SMI_SECONDS = 10.0
_SMI_BYTES = 256 << 10
_FILE_BYTES = 64 << 10
_MOST_LEVELS = 16
_PACKAGES = (
    "vllm", "torch", "transformers", "triton", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "flash-attn",
    "xformers", "ray", "numpy", "tokenizers", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas-cu12",
    "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-ml-py",
)  # fmt: skip
_V2 = ("memory.max", "memory.high", "memory.current", "memory.peak", "memory.swap.max", "memory.swap.current", "memory.events")
_V1 = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt", "memory.oom_control",
    "memory.memsw.limit_in_bytes",
)  # fmt: skip


def collect_here(
    root: Path = Path("/"), *, nvidia_smi: Sequence[str] = NVIDIA_SMI, wait_s: float = _SMI_SECONDS
) -> list[ArchivePart]:
    """Facts about this machine, as parts of an archive; `root` is where its /proc, /sys, /etc and /dev are."""
    parts = (
        ("versions.json", "Versions of plimsoll, Python, the system and packages beside plimsoll.", _versions(root)),
        ("nvidia-smi.txt", "The output of nvidia-smi.", _smi(nvidia_smi, wait_s)),
        ("meminfo.txt", "The host's memory.", _file_start(root / "proc/meminfo") or "/proc/meminfo: not there\n"),
        ("cgroup.txt", "Memory limits and events of the control groups plimsoll runs in.", _cgroup(root)),
        ("limits.json", "How much memory may be locked, and the size of /dev/shm.", _limits(root)),
    )
    return [
        ArchivePart(f"machine/{name}", "text", what, hide_homes(redact(facts)).encode("utf-8", "replace"))
        if isinstance(facts, str)
        else ArchivePart(f"machine/{name}", "json", what, json.dumps(facts, indent=2).encode())
        for name, what, facts in parts
    ]


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
    for name in _PACKAGES:
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
    assert process.stdout is not None
    try:
        data, why = _until(process.stdout.fileno(), time.monotonic() + wait_s, wait_s)
        if not why:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
                why = f"{name} ended with exit code {code}" if code else ""
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):  # with all that it started: it leads a group of its own
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # held by the driver: it is left behind, we go on
                process.wait(timeout=1)
        process.stdout.close()
    text = data.decode("utf-8", "replace").replace("\0", " ")
    return text + (f"\n[{why}]\n" if why else "")


def _until(descriptor: int, deadline: float, wait_s: float) -> tuple[bytes, str]:
    """The output before the deadline, and why it is cut."""

    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(max(1, int(left * 1000))):
            break
        block = os.read(descriptor, 64 << 10)
        if not block:
            return bytes(data), ""
        data += block
        if len(data) > _SMI_BYTES:
            return bytes(data[:_SMI_BYTES]), "the rest of its output was left out"
    return bytes(data), f"it did not finish within {wait_s:g} s"


def _cgroup(root: Path) -> str:
    """Limits and events, from plimsoll's own control group upwards: the one that bites may be any of them."""
    lines: list[str] = []
    own = _file_start(root / "proc/self/cgroup").splitlines()[:64]
    for entry in own:
        number, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            lines += _levels(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            lines += _levels(root / "sys/fs/cgroup/memory", path, _V1)
    if not lines:
        lines = [*_levels(root / "sys/fs/cgroup", "/", _V2), *_levels(root / "sys/fs/cgroup/memory", "/", _V1)]
    return "\n".join(lines or ["no memory control group found"]) + "\n"


def _levels(base: Path, path: str, names: Sequence[str]) -> Iterator[str]:
    pieces = [piece for piece in path.split("/") if piece not in ("", ".", "..")][:64]
    for level in range(min(len(pieces), _MOST_LEVELS) + 1):
        folder = base.joinpath(*pieces[: len(pieces) - level])
        found = [(name, " ".join(_file_start(folder / name, 4096).split())) for name in names]
        said = [f"  {name}: {value}" for name, value in found if value]
        if said:
            yield "own control group" if level == 0 else f"{level} above"
            yield from said


def _limits(root: Path) -> dict[str, object]:

    limits = [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(resource.RLIMIT_MEMLOCK)]
    try:
        shm = os.statvfs(root / "dev/shm")
        size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        return {"locked_memory_bytes": _limit(limits), "dev_shm": "not there"}
    return {"locked_memory_bytes": _limit(limits), "dev_shm": {"size_bytes": size, "free_bytes": free}}


def _limit(limits: list[int | None]) -> dict[str, object]:
    soft, hard = ("unlimited" if value is None else value for value in limits)
    return {"soft": soft, "hard": hard}
