"""Reads what a real start of vLLM said of its memory: from its log, or from the startup plan vLLM itself keeps.

A log may be plain or gzip. Numbers are all that leaves this module; arguments, paths and names in the log are passed over.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from plimsoll.domain.measured import Measured
from plimsoll.engine.start_figures import NEEDLES, measured_of
from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.safetensors_headers import open_plain

LOG_MAX_BYTES = 256 << 20  # unpacked
LINE_MAX_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20
PLAN_SCHEMA = 1  # PLAN_SCHEMA_VERSION of vllm/v1/worker/startup_plan.py, 0.26 to 0.32


def read_start(path: Path | str) -> Measured:
    """The figures of a start; BadInput in one line where the file holds none, TooLarge past 256 MiB."""
    path = Path(path)
    with open_plain(path) as file:
        try:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file
            head = stream.read(LINE_MAX_BYTES)
            plan = _startup_plan(head, path)
            found = plan or measured_of(_lines(head, stream, path))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise BadInput(f"{path}: a damaged gzip file") from None
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    if not found.has_memory:
        raise BadInput(
            f"{path}: no memory figures of a vLLM start in it; wanted is the log from the first line "
            '("Model loading took", "Available KV cache memory"), best with VLLM_LOGGING_LEVEL=DEBUG'
        )
    return found


def _startup_plan(head: bytes, path: Path) -> Measured | None:
    """VLLM_ENABLE_STARTUP_PLAN=1 keeps {schema, fingerprint, kv_cache_memory_bytes, free_memory_baseline} per rank."""
    if len(head) == LINE_MAX_BYTES or not head.lstrip().startswith(b"{"):
        return None
    try:
        loaded = json.loads(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(loaded, dict) or "kv_cache_memory_bytes" not in loaded:
        return None
    schema, kv, free = (loaded.get(key) for key in ("schema", "kv_cache_memory_bytes", "free_memory_baseline"))
    if schema != PLAN_SCHEMA:
        raise BadInput(f"{path}: a startup plan of another schema than {PLAN_SCHEMA}, the one vLLM 0.26 to 0.32 writes")
    if not _is_size(kv) or not _is_size(free):
        raise BadInput(f"{path}: a startup plan without its two sizes")
    return Measured(planned_kv_bytes=kv, free_bytes=free, ranks=1)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 50


def _lines(head: bytes, stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines that may tell something; an endless one comes in pieces. Most of a log is passed over a block at a time."""
    read, rest = len(head), head
    while more := stream.read(BLOCK_BYTES):
        read += len(more)
        if read > LOG_MAX_BYTES:
            raise TooLarge(f"{path}: more than {LOG_MAX_BYTES >> 20} MiB; give the part that holds the start")
        block = rest + more
        end = block.rfind(b"\n") + 1 or len(block)
        rest = block[end:]
        yield from _telling(block[:end])
    yield from _telling(rest)


def _telling(block: bytes) -> Iterator[bytes]:
    if any(needle in block for needle in NEEDLES):
        for line in block.split(b"\n"):
            if any(needle in line for needle in NEEDLES):
                yield from (line[at : at + LINE_MAX_BYTES] for at in range(0, len(line), LINE_MAX_BYTES))
