"""What is to be done about files that lie there already: written, left alone, kept because somebody edited them, removed.

The folder holds a list of what was generated, with checksums. A file that still has its checksum is ours to replace; any
other is somebody's work.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MANIFEST = "plimsoll-assets.json"
SCHEMA = "plimsoll.assets-manifest/1"


@dataclass(frozen=True)
class Changes:
    """Paths by what becomes of them; every path stands in one of these."""

    write: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # Edited, and what is generated has not changed since: nothing is lost by keeping them
    outdated: tuple[str, ...] = ()
    """Edited, and what is generated has changed as well: somebody has to bring the two together. Said once."""
    remove: tuple[str, ...] = ()  # Generated earlier, no longer part of it, and never edited
    left: tuple[str, ...] = ()  # Generated earlier, no longer part of it, and edited


def decide(
    wanted: Mapping[str, bytes], there: Mapping[str, bytes], recorded: Mapping[str, str], *, is_forced: bool = False
) -> Changes:
    """What to do: `there` is what lies under the names that are wanted or were recorded."""
    sorted_out: dict[str, list[str]] = {name: [] for name in ("write", "same", "kept", "outdated", "remove", "left")}
    for path, content in wanted.items():
        sorted_out[_fate(path, content, there, recorded, is_forced=is_forced)].append(path)
    for path, sha in recorded.items():
        if path not in wanted and path in there:
            sorted_out["remove" if is_forced or checksum(there[path]) == sha else "left"].append(path)
    return Changes(**{name: tuple(sorted(paths)) for name, paths in sorted_out.items()})


def _fate(path: str, content: bytes, there: Mapping[str, bytes], recorded: Mapping[str, str], *, is_forced: bool) -> str:
    if path not in there:
        return "write"
    if there[path] == content:
        return "same"
    if is_forced or recorded.get(path) == checksum(there[path]):
        return "write"
    return "kept" if recorded.get(path) == checksum(content) else "outdated"


def checksum(content: bytes) -> str:
    """What the list has of a file."""
    return hashlib.sha256(content).hexdigest()


def manifest(wanted: Mapping[str, bytes], recorded: Mapping[str, str], changes: Changes, made_by: Sequence[str]) -> bytes:
    """The list after the change, with what was generated: a file that is kept does not match it and stays known as edited."""
    gone = {*changes.remove, *changes.left}
    files = {path: sha for path, sha in recorded.items() if path not in gone}
    files |= {path: checksum(content) for path, content in wanted.items()}
    body = {"schema": SCHEMA, "made_by": list(made_by), "files": dict(sorted(files.items()))}
    return (json.dumps(body, indent=2) + "\n").encode()


def recorded_in(content: bytes | None) -> dict[str, str]:
    """What the list says; nothing where there is none or it cannot be read, so that every file counts as edited."""
    try:
        found = json.loads(content or b"")
    except (ValueError, RecursionError):
        return {}
    files = found.get("files") if isinstance(found, dict) and found.get("schema") == SCHEMA else None
    if not isinstance(files, dict):
        return {}
    return {path: sha for path, sha in files.items() if isinstance(sha, str) and is_inside(path)}


def is_inside(path: str) -> bool:
    """Whether a path of the list stays in the folder."""
    parts = path.split("/")
    return not path.startswith("/") and ".." not in parts and "" not in parts and "\0" not in path


def differences(wanted: Mapping[str, bytes], there: Mapping[str, bytes], stale: Sequence[str]) -> Iterator[str]:
    """A unified diff from what lies there to what would be generated, file by file."""
    for path in sorted({*wanted, *stale}):
        old, new = there.get(path), wanted.get(path)
        if old != new:
            yield from _difference(path, old, new)


def _difference(path: str, old: bytes | None, new: bytes | None) -> Iterator[str]:
    sides = [_lines(old), _lines(new)]
    if sides[0] is None or sides[1] is None:
        yield f"binary file {path} differs"
        return
    before = f"{path} (as it is)" if old is not None else "/dev/null"
    after = f"{path} (generated)" if new is not None else "/dev/null"
    yield from difflib.unified_diff(sides[0], sides[1], before, after, lineterm="")


def _lines(content: bytes | None) -> list[str] | None:
    try:
        return [] if content is None else content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None
