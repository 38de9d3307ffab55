"""The same traffic on the same memory, cut into blocks of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plimsoll.domain.trace import Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.replay import replay
from plimsoll.simulate.result import AtBlockSize
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.summary import summarise

OnProgress = Callable[[int, int], None]


def same_memory(settings: Settings, block_size: int) -> Settings | None:
    """As many tokens of cache in blocks of another size; the null block comes on top. None: not enough for one."""
    tokens = (settings.num_blocks - 1) * settings.block_size
    blocks = tokens // block_size
    return settings._replace(block_size=block_size, num_blocks=blocks + 1) if blocks else None


def at_block_sizes(
    trace: Trace,
    settings: Settings,
    step_time: StepTime,
    sizes: Sequence[int],
    *,
    speedup: float = 1.0,
    on_progress: OnProgress | None = None,
) -> list[AtBlockSize]:
    """One run for each size that the memory holds and the traffic can run in."""
    rows = []
    for number, size in enumerate(sizes):
        if on_progress is not None:
            on_progress(number, len(sizes))
        other = same_memory(settings, size)
        if other is None:
            continue
        try:
            found = replay(trace, other, step_time, speedup)
        except BadInput:  # what runs at one size may be stuck at another: there is nothing to show then
            continue
        summary = summarise(found)
        entries = found.totals.table_block_ns / found.totals.busy_ns if found.totals.busy_ns else 0.0
        waste, hits = summary.waste.mean_percent, summary.prefix.hit_rate
        rows.append(AtBlockSize(size, waste, hits, found.totals.preemptions, entries))
    return rows
