"""A log that is in memory, read as any file is."""

from __future__ import annotations

import tempfile

from plimsoll.domain.log import Log
from plimsoll.sources.texts import read_log


def log_of_bytes(source: str, data: bytes) -> Log:
    """What `read_log` makes of a file with these bytes."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_log(file.name, source=source)
