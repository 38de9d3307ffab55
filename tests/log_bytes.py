"""A log that is in memory, read as any file is."""

from __future__ import annotations

import tempfile

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.log_text import Log


def log_of_bytes(source: str, data: bytes) -> Log:
    """What `read_log` makes of a file with these bytes."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_log(file.name, source=source)
