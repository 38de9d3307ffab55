"""Keeps what the hub answered: one JSON file a model and revision, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from plimsoll.sources.model_folders import ModelFiles
from plimsoll.sources.safetensors_headers import TensorInfo

_SCHEMA = "plimsoll.model-files/1"
_MAX_BYTES = 512 << 20


def own_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Where plimsoll keeps what the hub answered."""
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".cache") / "plimsoll" / "models"


def cache_file(cache: Path, name: str, revision: str) -> Path:
    """Where the answer for a model and revision is kept; neither can lead out of the folder."""
    return cache / quote(name.replace("/", "--"), safe="") / f"{quote(revision, safe='')}.json"


def kept(cache: Path, name: str, revision: str) -> ModelFiles | None:
    """What is kept, or None where nothing is, or where it cannot be made sense of."""
    path = cache_file(cache, name, revision)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        loaded = json.loads(content)
        if len(content) > _MAX_BYTES or loaded["schema"] != _SCHEMA or loaded["name"] != name:
            return None
        tensors = loaded["tensors"]
        return ModelFiles(
            name=name,
            config=dict(loaded["config"]),
            tensors=None if tensors is None else tuple(TensorInfo(str(n), str(d), tuple(map(int, s))) for n, d, s in tensors),
            total_bytes=None if loaded["total_bytes"] is None else int(loaded["total_bytes"]),
            source=f"{loaded['source']}, kept in {path}",
            notes=tuple(map(str, loaded["notes"])),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(cache: Path, files: ModelFiles, revision: str) -> ModelFiles:
    """Keep it, and hand it on; a folder that cannot be written costs a note, never the plan."""
    import tempfile  # only where something was fetched

    path = cache_file(cache, files.name, revision)
    text = json.dumps({"schema": _SCHEMA} | files._asdict(), separators=(",", ":"), default=dict)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        note = f"What the hub answered could not be kept in {path.parent}: {error.strerror or error}."
        return files._replace(notes=(*files.notes, note))
    return files
