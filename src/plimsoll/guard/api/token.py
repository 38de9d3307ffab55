"""Where the token of guard's API lies when none was given: drawn at each start and left where only this user can read it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def place(port: int, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the token of the guard on this port lies; None if this user has no folder of his own."""
    runtime, home = environ.get("XDG_RUNTIME_DIR", ""), environ.get("HOME", "")
    if runtime.startswith("/"):
        return Path(runtime) / "plimsoll" / f"guard-{port}.token"
    return Path(home) / ".local" / "state" / "plimsoll" / f"guard-{port}.token" if home.startswith("/") else None


def keep(port: int, token: str, environ: Mapping[str, str] = os.environ) -> None:
    """Leave a token there; OSError if that cannot be done."""
    path = place(port, environ)
    if path is None:
        raise FileNotFoundError("neither XDG_RUNTIME_DIR nor HOME names a folder")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a new file: never one that somebody else has open, or a link
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


def forget(port: int, token: str, environ: Mapping[str, str] = os.environ) -> None:
    """Take it away, if it is still ours."""
    path = place(port, environ)
    with contextlib.suppress(OSError):
        if path is not None and path.read_text(encoding="ascii").strip() == token:
            path.unlink()
