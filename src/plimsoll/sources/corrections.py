"""Reads what real starts taught (`plimsoll plan --learn`); docs/learn.md says what the file holds."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.domain.correction import FILE_MAX_BYTES, Correction, corrections_file, decoded
from plimsoll.errors import BadInput
from plimsoll.sources.safetensors_headers import open_plain


def read_corrections(path: Path | None = None) -> dict[str, Correction]:
    """All corrections by their keys, none where there is no file; BadInput in one line for a file that is broken or newer."""
    if path is None:
        path = Path(corrections_file(os.environ, os.path.expanduser("~")))  # noqa: PTH111  (Path.home may raise)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    with open_plain(path) as file:
        try:
            content = file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    return decoded(content, str(path))
