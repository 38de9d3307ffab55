"""Writes one archive for a ticket: every secret and every user's text in it hidden, with a list of what is inside.

    write_bundle("case.tar.zst", parts, made_with="plimsoll 1.0")

The archive appears whole or not at all, and the same parts give the same bytes. Nothing is written but the file that was named
and, beside it, nameless or temporary files on the way there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

from plimsoll.actuators.bundle_read import Limits, kept
from plimsoll.actuators.bundle_text import Lines, shown_json, shown_line, shown_text
from plimsoll.domain.bundle import Member, Part, TextFile, Written
from plimsoll.errors import BadInput, PlimsollError, WorldFailed

CONTENTS = "CONTENTS.txt"
MOST_PARTS = 500
MOST_BYTES = 512 << 20  # in all members together
_LARGEST_JSON = 16 << 20
_ENDINGS = (".tar.zst", ".tar.gz", ".tgz", ".tar")


class _Kept(NamedTuple):
    """A member on its way: where its text lies in the spool."""

    member: Member
    start: int


def write_bundle(
    path: str, parts: Iterable[Part], *, made_with: str, at: int = 0, force: bool = False, left_out: Iterable[str] = ()
) -> Written:
    """Write the archive; `at` is the time (seconds since 1970) its members bear, `left_out` what the caller did not give.

    BadInput where the file is there already (unless `force`) or cannot be written by that name.
    """
    import tempfile

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
    return Written(path, size, tuple(one.member for one in found), tuple(missing))


def _checked(path: str, *, force: bool) -> Path:
    """The file to write; refused before any work is done."""
    if "\0" in path or not path.endswith(_ENDINGS) or Path(path).name in _ENDINGS:
        raise BadInput(f"{path!r}: name the archive .tar.zst, .tar.gz or .tar")
    if path.endswith(".zst"):
        from plimsoll.actuators.bundle_zstd import library

        if library() is None:
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


def _spooled(parts: Iterable[Part], spool: IO[bytes], missing: list[str]) -> list[_Kept]:
    """Every part as it will be shown, one after the other; what cannot be is added to what is missing."""
    found: list[_Kept] = []
    taken = {CONTENTS.casefold()}
    for part in parts:
        shown = shown_line(_base(part.name))
        start = spool.tell()
        if len(found) >= MOST_PARTS or start >= MOST_BYTES:
            missing.append(f"{shown}: the archive is full")
            continue
        try:
            note = _write_shown(part, spool)
        except PlimsollError as problem:
            spool.seek(start)
            spool.truncate()
            missing.append(f"{shown}: {shown_line(str(problem))}")
            continue
        came_from = f"from {shown_line(_base(part.content.path))}" if isinstance(part.content, TextFile) else ""
        note = "; ".join(piece for piece in (came_from, note) if piece)
        name = _member_name(part, taken)
        found.append(_Kept(Member(name, spool.tell() - start, shown_line(part.what), note), start))
    return found


def _base(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or "unnamed"


def _write_shown(part: Part, spool: IO[bytes]) -> str:
    """Write what may be shown of this part; what was left out of it."""
    if part.kind == "json" and isinstance(part.content, bytes) and len(part.content) <= _LARGEST_JSON:
        facts = shown_json(part.content)
        if facts is not None:
            spool.write(facts.encode("utf-8", "replace"))
            return ""
    return write_text(part.content, spool)


def write_text(
    content: bytes | TextFile | Callable[[], Iterable[bytes]],
    spool: IO[bytes],
    limits: Limits = Limits(),  # noqa: B008
) -> str:
    """Write what may be shown of a text, in bounded memory; what was left out of it."""
    text = kept(content, limits)
    lines = Lines()
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
    """How many lines begin in so many first bytes."""
    count = 1
    for block in blocks:
        count += block.count(b"\n", 0, max(0, size))
        size -= len(block)
    return count


def _member_name(part: Part, taken: set[str]) -> str:
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


def _contents(archive: str, found: list[_Kept], missing: list[str], made_with: str) -> str:
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


def _pack(file: IO[bytes], name: str, contents: bytes, found: list[_Kept], spool: IO[bytes], at: int) -> None:
    import tarfile

    folder = _harmless(next(name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)))
    stream = _packing(file, name, at)
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member, start in [(Member(CONTENTS, len(contents), ""), -1), *found]:
            entry = tarfile.TarInfo(f"{folder}/{member.name}")
            entry.size, entry.mtime, entry.mode = member.size_bytes, at, 0o644
            if start < 0:
                import io

                archive.addfile(entry, io.BytesIO(contents))
            else:
                spool.seek(start)
                archive.addfile(entry, spool)
    if stream is not file:
        stream.close()


def _packing(file: IO[bytes], name: str, at: int) -> IO[bytes]:
    if name.endswith(".zst"):
        from plimsoll.actuators.bundle_zstd import packing

        return packing(file)
    if name.endswith("gz"):
        import gzip
        from typing import cast

        return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=at))
    return file
