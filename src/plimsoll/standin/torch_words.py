"""torch's own words for an allocation that failed, as 2.11 prints them; clients, logs and `plimsoll doctor` read them."""

from __future__ import annotations

from collections.abc import Iterator

NEIGHBOUR_PID = 4711  # a process that is not there, as torch's message would name it


def oom_text(*, total: int, graphs: int, tried: int, free: int, own: int, live: int, left: int, neighbours: int) -> str:
    """The whole message. `own`: all that this process holds; `left`: reserved by torch, and not live."""
    return " ".join(_sentences(total, graphs, tried, free, own, live, left, neighbours))


def _sentences(
    total: int, graphs: int, tried: int, free: int, own: int, live: int, left: int, neighbours: int
) -> Iterator[str]:
    yield f"CUDA out of memory. Tried to allocate {in_words(tried)}."
    yield f"GPU 0 has a total capacity of {in_words(total)} of which {in_words(free)} is free."
    yield f"Including non-PyTorch memory, this process has {in_words(own)} memory in use."
    if neighbours:
        yield f"Process {NEIGHBOUR_PID} has {in_words(neighbours)} memory in use."
    pool = f"with {in_words(graphs)} allocated in private pools (e.g., CUDA Graphs), " if graphs else ""
    yield f"Of the allocated memory {in_words(live)} is allocated by PyTorch, {pool}and {in_words(left)} is reserved by PyTorch"
    yield "but unallocated. If reserved but unallocated memory is large try setting"
    yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management "
    yield "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"


def in_words(size: int) -> str:
    """A size as torch prints it."""
    for unit, name in ((1 << 10, "bytes"), (1 << 20, "KiB"), (1 << 30, "MiB")):
        if size <= unit:
            return f"{size} bytes" if name == "bytes" else f"{size / (unit >> 10):.2f} {name}"
    return f"{size / (1 << 30):.2f} GiB"
