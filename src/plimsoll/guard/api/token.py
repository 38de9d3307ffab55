"""The token of guard's API when none was configured: drawn at each start, in a file that only this user can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def token_path(port: int, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the token file of the guard on this port; None if this user has no home."""
    runtime, home = environ.get("XDG_RUNTIME_DIR", ""), environ.get("HOME", "")
    if runtime.startswith("/"):
        return Path(runtime) / "plimsoll" / f"guard-{port}.token"
    return Path(home) / ".local" / "state" / "plimsoll" / f"guard-{port}.token" if home.startswith("/") else None


def write_token(port: int, token: str, environ: Mapping[str, str] = os.environ) -> None:
    """Writes the token where only this user can read it; OSError if that fails."""
    path = token_path(port, environ)
    if path is None:
        raise FileNotFoundError("neither XDG_RUNTIME_DIR nor HOME names a folder")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")  # a reader finds the whole token or none
    part.unlink(missing_ok=True)  # a new file: never an open one, or a link
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    part.replace(path)


def remove_token(port: int, token: str, environ: Mapping[str, str] = os.environ) -> None:
    path = token_path(port, environ)
    with contextlib.suppress(OSError):
        if path is not None and path.read_text(encoding="ascii").strip() == token:
            path.unlink()
