"""Finds errors that surely mean "the device is out of memory", and reads the place, the bytes asked for and the bytes free.

The error reaches the engine core as torch raised it (one process), or as text that the executor wraps (several). Any other
error, and any text that only mentions memory, does not count: vLLM then dies as it would have.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from plimsoll.inside.settings import data_table

# torch's allocator; the CUDA runtime and driver where torch or Triton report them. A host out of memory does not match.
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory\. |CUDA error: out of memory|CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory"
)
_WRAPPED = "Worker failed with error '"
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (B|KiB|MiB|GiB|TiB)\b")
_FREE = re.compile(r" of which ([\d.]+) (B|KiB|MiB|GiB|TiB) is free\b")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DEEPEST = 400  # frames to look at

# The innermost of these functions on the stack names the place; first and second runner, 0.25 to 0.32.
_SITES = {name: site for site, names in data_table("survive")["sites"].items() for name in names}


@dataclass(frozen=True)
class StepFailure:
    """A step that ran out of device memory."""

    site: str = "unknown"
    asked_bytes: int | None = None
    free_bytes: int | None = None


def identify(error: BaseException) -> StepFailure | None:
    """Returns the failure, if this error or one it was raised from surely means a device out of memory, else None."""
    for seen in _chain(error, suppressed=False):
        text = str(seen)[:4096]
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        # A worker's process sends text, in quotes that the executor adds. Triton raises a plain RuntimeError.
        is_wrapped = type(seen) is RuntimeError and text.startswith(_WRAPPED)
        is_known = "OutOfMemoryError" in kinds or "AcceleratorError" in kinds or type(seen) is RuntimeError
        if is_known and _OUT_OF_MEMORY.match(text, len(_WRAPPED) if is_wrapped else 0):
            site = "unknown"
            for frame in _frames(seen):
                site = _SITES.get(frame.f_code.co_name, site)
            return StepFailure(site, _size(_ASKED, text), _size(_FREE, text))
    return None


def _chain(error: BaseException, *, suppressed: bool) -> Iterator[BaseException]:
    """Yields the error and those it was raised from; with `suppressed` also those that `from None` hides."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return
        yield seen
        is_hidden = seen.__suppress_context__ and not suppressed
        seen = seen.__cause__ or (None if is_hidden else seen.__context__)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yields the frames that the error went through, the innermost last."""
    trace = error.__traceback__
    for _ in range(_DEEPEST):
        if trace is None:
            return
        yield trace.tb_frame
        trace = trace.tb_next


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        return None
    return round(float(match[1]) * _UNITS[match[2]])


def local_of(error: BaseException, functions: tuple[str, ...], name: str) -> Any:
    """Returns a local variable of the innermost function of these names that the error went through; None without one."""
    value = None
    for frame in _frames(error):
        if frame.f_code.co_name in functions:
            value = frame.f_locals.get(name, value)
    return value


def release_frames(error: BaseException) -> None:
    """Clears the error's frames: they hold tensors of the failed step, which would stay on the device."""
    for seen in _chain(error, suppressed=True):
        traceback.clear_frames(seen.__traceback__)


class SiteNote(logging.Filter):
    """A log filter that reads a failure's place from the line that a worker's process logs for it; free while all is well."""

    def __init__(self) -> None:
        super().__init__()
        self.last = StepFailure()

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps every line; notes the failure of a line with an error."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.last = identify(error) or StepFailure()
        return True


NOTE = SiteNote()  # one for each process
