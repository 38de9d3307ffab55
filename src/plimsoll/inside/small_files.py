"""Small JSON files between the processes of one server: replaced whole, for this user's eyes only, distrusted when read."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any


def write_whole(folder: str, stem: str, content: dict[str, Any]) -> None:
    """Put `stem`.json there, whole or not at all; one thread of one process writes it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    temporary = f"{folder}/.{stem}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, f"{folder}/{stem}.json")  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise


def read_whole(path: str, largest: int) -> Any:
    """What the file holds; ValueError where it is another user's, no plain file, too large or no JSON."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            raise ValueError("not a file of this user")
        text = file.read(largest + 1)
    if len(text) > largest:
        raise ValueError("too large")
    return json.loads(text)
