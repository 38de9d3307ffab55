"""Traffic: when requests arrived, how long they were, and which of their beginnings they share.

Content is never kept. Two requests share a beginning when their first prefix ids are equal; each id stands for `prefix_block`
tokens. A request without ids shares nothing.

    prefix_ids    7 8 9 | 7 8 5 2 |   | ...           one row of numbers for the whole trace
    prefix_start  0       3         7   7 ...          where each request's ids begin; one longer than the trace
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
States = npt.NDArray[np.uint8]


class Trace(NamedTuple):
    """Requests in order of arrival; the first arrives at 0 unless the trace was cut out of a longer one."""

    name: str
    arrival_ns: Integers
    """Sorted; rows of one instant keep the file's order."""
    prompt: Integers
    output: Integers
    """Tokens to generate, at least 1."""
    priority: Integers
    """Lower goes first, as vLLM's `priority`; only the priority policy looks at it."""
    prefix_ids: Integers
    prefix_start: Integers
    prefix_block: int = 512
    """Tokens that one prefix id covers."""
    bad_rows: int = 0
    """Rows that were left out because they could not be read."""

    @property
    def size(self) -> int:
        """How many requests there are."""
        return len(self.arrival_ns)

    @property
    def shares_content(self) -> bool:
        """Whether any request says what its prompt begins with."""
        return len(self.prefix_ids) > 0

    def ids_of(self, request: int) -> Integers:
        """The prefix ids of one request."""
        return self.prefix_ids[self.prefix_start[request] : self.prefix_start[request + 1]]


def make_trace(
    name: str,
    arrival_ns: npt.ArrayLike,
    prompt: npt.ArrayLike,
    output: npt.ArrayLike,
    priority: npt.ArrayLike | None = None,
    ids: list[list[int]] | None = None,
    prefix_block: int = 512,
) -> Trace:
    """A trace from plain lists in order of arrival; for readers and tests."""
    arrivals = np.asarray(arrival_ns, dtype=np.int64)
    start = np.zeros(len(arrivals) + 1, dtype=np.int64)
    flat: list[int] = []
    if ids is not None:
        np.cumsum([len(row) for row in ids], out=start[1:])
        flat = [one for row in ids for one in row]
    return Trace(
        name,
        arrivals,
        np.asarray(prompt, dtype=np.int64),
        np.maximum(1, np.asarray(output, dtype=np.int64)),
        np.zeros(len(arrivals), dtype=np.int64) if priority is None else np.asarray(priority, dtype=np.int64),
        np.asarray(flat, dtype=np.int64),
        start,
        prefix_block,
    )
