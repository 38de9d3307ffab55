"""Memory that creeps, out of a range of time: on the GPU, in the allocator, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from plimsoll.doctor.trend_growth import Growth, forecast, growth
from plimsoll.doctor.trend_words import ahead, duration, rate
from plimsoll.domain.finding import Code, Evidence, Finding, Remedy, Severity
from plimsoll.domain.series import Series
from plimsoll.domain.units import GIB, MIB, format_gib

GPU_LEAST = 64.0 * MIB
HOST_LEAST = 128.0 * MIB
DAY_S = 86400.0
_NO_LIMIT = float(1 << 60)  # how cgroups say that there is none
_HELD_LEAST = 512.0 * MIB
# Labels that tell one GPU, process or container from another; the rest may differ between exporters.
_WHERE = ("instance", "pod", "exported_pod", "container", "job", "gpu", "UUID", "device", "worker", "rank", "engine")


def judge_gpu(series: Sequence[Series], source: str) -> list[Finding]:
    """Growth of what torch cannot give back; where only the driver's figure is known, of that, with less confidence."""
    rising = _retries(series)
    own = list(_held(series))
    watched = own or [one for one in series if one.figure == "gpu_used"]
    found: list[Finding] = []
    for one in watched:
        grown = growth(one.times, one.values, least=GPU_LEAST, restarts=_restarts(series, one), load=_load(series, one))
        if grown is not None:
            found.append(_gpu_finding(one, grown, series, source, rising, is_own=bool(own)))
    if rising is not None:
        found.append(_retry_finding(rising, series, source, is_growing=bool(found)))
    return found


def judge_host(series: Sequence[Series], source: str) -> list[Finding]:
    """Growth of host memory: of processes and containers; of the working set only where nothing better is known."""
    watched = [one for one in series if one.figure in ("host_resident", "container_resident")]
    has_better = bool(watched)
    watched = watched or [one for one in series if one.figure == "container_working_set"]
    found = []
    for one in watched:
        grown = growth(one.times, one.values, least=HOST_LEAST, restarts=_restarts(series, one), load=_load(series, one))
        if grown is not None:
            found.append(_host_finding(one, grown, series, source, is_sure=has_better))
    return found


def _held(series: Sequence[Series]) -> Iterable[Series]:
    """What torch holds and cannot give back, GPU by GPU: live tensors and the unused parts of blocks that hold live ones."""
    for one in series:
        if one.figure != "torch_allocated":
            continue
        other = _partner(series, one, "torch_inactive_split")
        more = dict(zip(other.times, other.values, strict=True)) if other is not None else {}
        values = tuple(v + more.get(t, 0.0 if other is None else math.nan) for t, v in zip(one.times, one.values, strict=True))
        yield one._replace(values=values)


def _gpu_finding(
    one: Series, grown: Growth, series: Sequence[Series], source: str, rising: Series | None, *, is_own: bool
) -> Finding:
    total = _last(_partner(series, one, "gpu_total")) or _sum_of_last(series, one)
    used = _last(_partner(series, one, "gpu_used")) if is_own else grown.level
    coming = forecast(grown, total, used)
    what = "What torch cannot give back" if is_own else "The memory in use"
    because = (
        f"{what} on {_who(one)} grew by {format_gib(round(grown.rise))} in {duration(grown.span_s)}, {rate(grown)}, "
        f"and goes on (chance {max(grown.chance, 1e-9):.0e}). {ahead(coming, total)}"
        + ("" if is_own else " What torch could give back is in this figure: plimsoll's allocator metrics would tell.")
        + _caution(grown, series, one)
        + (
            " Allocations already fail at first and are tried again: that is the sign that comes before the end."
            if rising
            else ""
        )
    )
    soon = coming is not None and coming.likely_s < DAY_S
    return Finding(
        Code.GPU_GROWTH, Severity.CRITICAL if soon or rising else Severity.WARNING,
        _confidence(grown, series, one, 0.85 if is_own else 0.6), "GPU memory grows and is not given back",
        because, _shown(one, source),
        (
            Remedy("take two memory snapshots of a worker some hours apart", "their difference names the code that keeps it"),
            Remedy("restart the replica in a quiet hour until it is mended", "nothing else gives this memory back"),
        ),
        ("torch.cuda.empty_cache and compaction: this memory is not free inside torch",) if is_own else (),
    )  # fmt: skip


def _host_finding(one: Series, grown: Growth, series: Sequence[Series], source: str, *, is_sure: bool) -> Finding:
    limit = _last(_partner(series, one, "container_limit"))
    limit = limit if limit is not None and 0 < limit < _NO_LIMIT else None
    coming = forecast(grown, limit)
    because = (
        f"The host memory of {_who(one)} grew by {format_gib(round(grown.rise))} in {duration(grown.span_s)}, {rate(grown)}, "
        f"and goes on (chance {max(grown.chance, 1e-9):.0e}). {ahead(coming, limit)}"
        + ("" if is_sure else " The working set holds cached files too, which the kernel drops when it must.")
        + _caution(grown, series, one)
    )
    soon = coming is not None and coming.likely_s < DAY_S and is_sure
    return Finding(
        Code.HOST_GROWTH, Severity.CRITICAL if soon else Severity.WARNING,
        _confidence(grown, series, one, 0.8 if is_sure else 0.4), "Host memory grows and is not given back",
        because, _shown(one, source),
        (
            Remedy("make the cache of images and audio smaller", "it is kept in host memory", "--mm-processor-cache-gb"),
            Remedy("restart the replica before the limit", "the kernel would kill it in the middle of its work"),
        ),
        ("--gpu-memory-utilization: it rules the GPU's memory, not the host's",),
    )  # fmt: skip


def _retry_finding(rising: Series, series: Sequence[Series], source: str, *, is_growing: bool) -> Finding:
    allocated, reserved = (_last(_partner(series, rising, f"torch_{name}")) for name in ("allocated", "reserved"))
    unused = reserved - allocated if reserved is not None and allocated is not None else None
    failed = sum(_increase(one) for one in series if one.figure == "torch_ooms")
    split = unused is not None and unused >= _HELD_LEAST
    if unused is None:
        said = "How much torch holds unused is not known."
    elif split:
        said = f"torch holds {format_gib(round(unused))} unused, cut into pieces too small for what was asked."
    else:
        said = f"torch holds only {format_gib(round(unused))} unused: the card is really full rather than cut into pieces."
    because = (
        f"On {_who(rising)} torch had to free its cache and try again {_increase(rising):.0f} times in "
        f"{duration(rising.times[-1] - rising.times[0])}, also in the last half of it. {said}"
        + (f" {failed:.0f} allocations failed for good." if failed else "")
        + " No forecast: the size of the next request decides."
    )
    return Finding(
        Code.ALLOCATOR_FRAGMENTATION, Severity.CRITICAL if failed or is_growing else Severity.WARNING,
        0.75 if split else 0.35, "The allocator finds no room at the first try, again and again", because,
        _shown(rising, source),
        (
            Remedy("let segments grow", "pieces then join", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
            Remedy("leave more of the card to activations", "less is then cut", "--gpu-memory-utilization"),
        ),
        ("raising --gpu-memory-utilization: it takes away the very room that is missing",),
    )  # fmt: skip


def _retries(series: Sequence[Series]) -> Series | None:
    """The retry counter that rose most, if one rose in at least two places, one of them in its last half."""
    found = []
    for one in series:
        if one.figure == "torch_alloc_retries" and len(one.times) >= 4:
            rises = [t for (_, a), (t, b) in pairwise(zip(one.times, one.values, strict=True)) if b > a]
            if len(rises) >= 2 and rises[-1] >= (one.times[0] + one.times[-1]) / 2:
                found.append(one)
    return max(found, key=_increase, default=None)


def _increase(one: Series) -> float:
    return sum(b - a for a, b in pairwise(v for v in one.values if math.isfinite(v)) if b > a)


def _caution(grown: Growth, series: Sequence[Series], one: Series) -> str:
    if grown.span_s < DAY_S and _load(series, one) is None:
        return " Less than a day was seen, and no load beside it: a daily rhythm would look the same."
    return ""


def _confidence(grown: Growth, series: Sequence[Series], one: Series, most: float) -> float:
    return min(most, 0.5) if _caution(grown, series, one) else most


def _restarts(series: Sequence[Series], one: Series) -> tuple[float, ...]:
    other = _partner(series, one, "started_at", needs=("instance",))
    return tuple(v for v in other.values if math.isfinite(v)) if other is not None else ()


def _load(series: Sequence[Series], one: Series) -> tuple[Sequence[float], Sequence[float]] | None:
    """The number of running requests beside it, if there is one such series for it or only one at all."""
    running = [s for s in series if s.figure == "running"]
    found = _partner(series, one, "running", needs=("instance",)) or (running[0] if len(running) == 1 else None)
    return (found.times, found.values) if found is not None else None


def _partner(series: Sequence[Series], one: Series, figure: str, needs: Iterable[str] = ()) -> Series | None:
    """The series of another figure about the same thing: no label of those that tell things apart differs."""
    found = [s for s in series if s.figure == figure and _same(s.labels, one.labels)]
    found = [s for s in found if all(n in s.labels and n in one.labels for n in needs)]
    return max(found, key=lambda s: sum(s.labels.get(k) == v for k, v in one.labels.items()), default=None)


def _same(one: Mapping[str, str], two: Mapping[str, str]) -> bool:
    return all(one[k] == two[k] for k in _WHERE if k in one and k in two)


def _last(one: Series | None) -> float | None:
    values = [v for v in one.values if math.isfinite(v)] if one is not None else []
    return values[-1] if values else None


def _sum_of_last(series: Sequence[Series], one: Series) -> float | None:
    """Used and free together are the whole card."""
    used, free = _last(_partner(series, one, "gpu_used")), _last(_partner(series, one, "gpu_free"))
    return used + free if used is not None and free is not None and used + free > GIB else None


def _who(one: Series) -> str:
    named = [f"{k} {one.labels[k]}" for k in _WHERE if k in one.labels and k != "job"]
    return ", ".join(named[:3]) or one.name


def _shown(one: Series, source: str) -> tuple[Evidence, ...]:
    finite = [(t, v) for t, v in zip(one.times, one.values, strict=True) if math.isfinite(v)]
    labels = ",".join(f'{k}="{v}"' for k, v in sorted(one.labels.items()) if k in _WHERE)
    ends = [finite[0], finite[-1]] if finite else []
    return tuple(Evidence(source, f"{one.name}{{{labels}}} {value:.10g} @{at:.0f}") for at, value in ends)
