"""Compares a folder with the generated files, and writes them: edited files are kept, and links are never followed.

The folder holds a list of the generated files, with checksums. A file that still has its checksum may be replaced; any other
is somebody's work. Each file appears complete or not at all.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll.errors import BadInput, WorldFailed

MANIFEST = "plimsoll-assets.json"
SCHEMA = "plimsoll.assets-manifest/1"


@dataclass(frozen=True)
class Changes:
    """Paths by their fate; every path is in exactly one of these."""

    write: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # Edited, while the generated text has not changed since: nothing is lost by keeping them
    outdated: tuple[str, ...] = ()
    """Edited, and what is generated has changed as well: somebody has to bring the two together. Said once."""
    remove: tuple[str, ...] = ()  # Generated earlier, no longer part of it, and never edited
    left: tuple[str, ...] = ()  # Generated earlier, no longer part of it, and edited


def decide(
    wanted: Mapping[str, bytes], there: Mapping[str, bytes], recorded: Mapping[str, str], *, is_forced: bool = False
) -> Changes:
    """Sorts paths by what to do with them; `there` has the present content of wanted and recorded paths."""
    fates: dict[str, list[str]] = {name: [] for name in ("write", "same", "kept", "outdated", "remove", "left")}
    for path in sorted({*wanted, *(recorded.keys() & there.keys())}):
        is_ours = is_forced or (path in there and recorded.get(path) == checksum(there[path]))
        if path not in wanted:
            fate = "remove" if is_ours else "left"
        elif there.get(path) == wanted[path]:
            fate = "same"
        elif path not in there or is_ours:
            fate = "write"
        else:
            fate = "kept" if recorded.get(path) == checksum(wanted[path]) else "outdated"
        fates[fate].append(path)
    return Changes(**{name: tuple(paths) for name, paths in fates.items()})


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest(wanted: Mapping[str, bytes], recorded: Mapping[str, str], changes: Changes, made_by: Sequence[str]) -> bytes:
    """Returns the list after the change, with generated checksums: a kept file does not match, and stays known as edited."""
    gone = {*changes.remove, *changes.left}
    files = {path: sha for path, sha in recorded.items() if path not in gone}
    files |= {path: checksum(content) for path, content in wanted.items()}
    body = {"schema": SCHEMA, "made_by": list(made_by), "files": dict(sorted(files.items()))}
    return (json.dumps(body, indent=2) + "\n").encode()


def recorded_in(content: bytes | None) -> dict[str, str]:
    """Returns checksums by path; none where the list cannot be read, so that every file counts as edited."""
    try:
        found = json.loads(content or b"")
    except (ValueError, RecursionError):
        return {}
    files = found.get("files") if isinstance(found, dict) and found.get("schema") == SCHEMA else None
    if not isinstance(files, dict):
        return {}
    return {path: sha for path, sha in files.items() if isinstance(sha, str) and is_inside(path)}


def is_inside(path: str) -> bool:
    """True if a path of the list stays in the folder."""
    parts = path.split("/")
    return not path.startswith("/") and ".." not in parts and "" not in parts and "\0" not in path


def differences(wanted: Mapping[str, bytes], there: Mapping[str, bytes], stale: Sequence[str]) -> Iterator[str]:
    """Yields a unified diff from the present to the generated text, file by file."""
    for path in sorted({*wanted, *stale}):
        old, new = there.get(path), wanted.get(path)
        if old == new:
            continue
        before = f"{path} (as it is)" if old is not None else "/dev/null"
        after = f"{path} (generated)" if new is not None else "/dev/null"
        try:
            sides = [(content or b"").decode("utf-8").splitlines() for content in (old, new)]
        except UnicodeDecodeError:
            yield f"binary file {path} differs"
        else:
            yield from difflib.unified_diff(sides[0], sides[1], before, after, lineterm="")


LARGEST_BYTES = 16 << 20  # no generated file comes near it


def read_there(folder: str, paths: Iterable[str]) -> dict[str, bytes]:
    """Returns the content of the files that exist under these paths. BadInput for a link or anything but a file."""
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise BadInput(f"{folder}: a file, and a folder is needed")
    found: dict[str, bytes] = {}
    for path in paths:
        _refuse_links(root, path)
        target = root / path
        try:
            if not target.exists():
                continue
            if not target.is_file():
                raise BadInput(f"{target}: neither a file nor free")
            if target.stat().st_size > LARGEST_BYTES:
                raise BadInput(f"{target}: larger than anything that is generated; it is not replaced")
            found[path] = target.read_bytes()
        except OSError as error:
            raise WorldFailed(f"{target}: cannot be read: {error.strerror or error}") from None
    return found


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    root = Path(folder)
    for path, content in files.items():
        _refuse_links(root, path)
        _write(root / path, content)


def remove_files(folder: str, paths: Iterable[str]) -> None:
    root = Path(folder)
    for path in paths:
        _refuse_links(root, path)
        try:
            (root / path).unlink(missing_ok=True)
        except OSError as error:
            raise WorldFailed(f"{root / path}: cannot be removed: {error.strerror or error}") from None


def _refuse_links(root: Path, path: str) -> None:
    """Raises BadInput for a link below the folder; the folder itself may be one, since the user named it."""
    place = root
    for part in path.split("/"):
        place = place / part
        if place.is_symlink():
            raise BadInput(f"{place}: a link; nothing is read or written through it")


def _write(target: Path, content: bytes) -> None:
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".new", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            os.fchmod(file.fileno(), 0o755 if content.startswith(b"#!") else 0o644)
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise WorldFailed(f"{target}: cannot be written: {error.strerror or error}") from None
