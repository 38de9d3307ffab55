"""Reads and writes a folder of generated files: each appears whole or not at all, and nothing goes through a link.

Reading belongs here because it is about what is to be replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from plimsoll.errors import BadInput, WorldFailed

LARGEST_BYTES = 16 << 20  # none of ours comes near it


def read_there(folder: str, paths: Iterable[str]) -> dict[str, bytes]:
    """What lies under these paths; a path that nobody has is left out. BadInput for a link or anything but a file."""
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
    """Put the files there, in order; scripts may be run."""
    root = Path(folder)
    for path, content in files.items():
        _refuse_links(root, path)
        _write(root / path, content)


def remove_files(folder: str, paths: Iterable[str]) -> None:
    """Take files away that were generated earlier."""
    root = Path(folder)
    for path in paths:
        _refuse_links(root, path)
        try:
            (root / path).unlink(missing_ok=True)
        except OSError as error:
            raise WorldFailed(f"{root / path}: cannot be removed: {error.strerror or error}") from None


def _refuse_links(root: Path, path: str) -> None:
    """The folder itself may be a link, since the user named it; below it none is followed."""
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
            os.fchmod(file.fileno(), 0o755 if target.suffix == ".sh" else 0o644)
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise WorldFailed(f"{target}: cannot be written: {error.strerror or error}") from None
