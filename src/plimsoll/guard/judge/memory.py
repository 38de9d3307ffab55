"""Judges memory: a sick card, allocation retries, growth, thin slack, a neighbour in need, the host."""

from __future__ import annotations

from plimsoll.doctor.rules.kernel import Blame, explain
from plimsoll.doctor.rules.trend_growth import SPAN_LEAST_S, Forecast, Growth, forecast, growth, rate
from plimsoll.findings import Evidence
from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.look import Look, WorkerMemory
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.judge.tracker import WORST, Assessment, no, unknown, yes
from plimsoll.units import format_gib
from plimsoll.unknown import Status, Unknown


def sick(_history: History, _policy: Policy, look: Look) -> Assessment:
    """An Xid that means hardware, or an uncorrected ECC error, since guard began to look."""
    if not look.cards:
        return unknown("NotReadable", "no NVML on this host, or the engine runs on another host")
    errors = []
    for one in look.cards:
        errors += [f"Xid {xid} on card {one.name}" for xid in one.xids if explain(xid).blame is Blame.FAULT]
        errors += [f"{one.uncorrectable} uncorrectable ECC errors on card {one.name}"] if one.uncorrectable else []
    if errors:
        return yes("HardwareErrors", errors[0], *(Evidence("driver", text) for text in errors[:5]))
    return no("Well", "the driver reports no error")


LATELY_S = 1_800.0
WINDOWS = ((0, 2), (150, 5), (720, 15))  # coarse points (0: the last half hour), and how many new ones until the next check
NO_PROBE = "no probe reports the workers' memory: start vLLM with --worker-extension-cls plimsoll.inside.Probe"


def retries(history: History, policy: Policy, _look: Look) -> Assessment:
    """Allocations that failed at first: torch released its cache and tried again. The leading sign of real trouble."""
    return _retries(history, policy, policy.number("retries", "least"))


def _retries(history: History, policy: Policy, least: float) -> Assessment:
    over_s = policy.number("retries", "over")
    if isinstance(history.now("retries"), Unknown):
        return unknown("NoProbe", _no_probe(history))
    rose = history.since("retries", over_s).rise
    text = f"{rose:.0f} allocations failed at first in the last {over_s / 60:.0f} min"
    if rose >= least:
        return yes("AllocationsFail", text, Evidence("plimsoll_torch_num_alloc_retries", f"+{rose:.0f}"))
    return no("NoRetries", text)


def held_growth(history: History, policy: Policy, _look: Look) -> Assessment:
    """The memory that torch holds and cannot release keeps growing; a staircase that has ended does not count."""
    return _growing(_grown(history, "held", policy.number("growth", "least")), "held", "memory that nothing gives back")


def _growing(grown: Growth | Unknown | None, name: str, what: str) -> Assessment:
    if isinstance(grown, Unknown):
        return unknown("NotLongEnough", grown.reason)
    if grown is None:
        return no("Level", f"{what} does not grow")
    text = f"grows by {rate(grown)}, seen over {grown.span_s / 3600:.1f} h"
    return yes("Grows", f"{what} {text}", Evidence(name, text))


def exhausted(history: History, policy: Policy, look: Look) -> Assessment:
    """Both growth that nothing releases and failed allocations. Only a restart helps, and soon."""
    failing = _retries(history, policy, policy.number("exhausted", "least"))
    if failing.status is not Status.TRUE:
        return failing._replace(evidence=())
    growing = held_growth(history, policy, look)
    if growing.status is not Status.TRUE:
        return growing
    return yes("GrowsAndFails", f"{growing.message}; {failing.message}", *growing.evidence, *failing.evidence)


def slack(history: History, policy: Policy, _look: Look) -> Assessment:
    """Little of a device is free, and little could be released: on the worker that has the least of both."""
    room = history.now("room")
    if isinstance(room, Unknown):
        return unknown("NoProbe", _no_probe(history))
    text = f"{format_gib(int(room))} free or could be given back"
    if room < policy.number("slack", "least"):
        return yes("Thin", f"little is left on the device: {text}", Evidence("device", text))
    return no("Room", text)


def neighbour(history: History, policy: Policy, look: Look) -> Assessment:
    """Something outside torch came and needs memory on a card where torch holds much that it does not use."""
    if isinstance(history.now("room"), Unknown):
        return unknown("NoProbe", _no_probe(history))
    found = [_neighbour_of(history, policy, worker) for worker in look.workers]
    return min(found, key=lambda seen: WORST.index(seen.status), default=unknown("NoProbe", NO_PROBE))


def _neighbour_of(history: History, policy: Policy, worker: WorkerMemory) -> Assessment:
    free, releasable, others = worker.device_free, worker.releasable, worker.by_others
    if free is None or releasable is None or others is None:
        return unknown("NoProbe", f"worker {worker.rank} does not report who holds its device")
    text = f"others hold {format_gib(int(others))}, {format_gib(int(free))} free, {format_gib(int(releasable))} unused by torch"
    if free >= policy.number("neighbour", "free") or releasable < policy.number("neighbour", "releasable"):
        return no("Room", text)
    came = history.came(worker.rank, others)
    if came < policy.number("neighbour", "came"):
        return no("NobodyCame", text)
    return yes("NeighbourInNeed", f"another process took {format_gib(int(came))}: {text}", Evidence("device", text))


def _no_probe(history: History) -> str:
    """Returns why the workers' figures are missing: some stopped reporting, or there is no probe."""
    return "not every worker reports its memory" if history.has_workers else NO_PROBE


def host_growth(history: History, policy: Policy, _look: Look) -> Assessment:
    return _growing(_grown(history, "host_resident", policy.number("host", "least")), "host_resident", "host memory")


def device_forecast(history: History, policy: Policy) -> Forecast | Unknown:
    """Returns when growth will have used up the free and the releasable memory."""
    grown = _grown(history, "held", policy.number("growth", "least"))
    room = history.now("room")
    if grown is None or isinstance(grown, Unknown) or isinstance(room, Unknown):
        return Unknown("no growth" if grown is None else "not enough data")
    # Growth is of all workers together, room of the tightest: the time is right if all of the growth is there.
    return forecast(grown, grown.level + room) or Unknown("too uncertain to forecast")


def host_forecast(history: History, policy: Policy) -> Forecast | Unknown:
    """Returns when growth will have used up the host's memory."""
    grown = _grown(history, "host_resident", policy.number("host", "least"))
    last = history.last
    limits = [] if last is None else [worker.host_limit for worker in last.workers if worker.host_limit]
    if last is not None and last.figures.get("host_limit", 0.0) > 0:
        limits.append(last.figures["host_limit"])
    if grown is None or isinstance(grown, Unknown) or not limits:
        return Unknown("no growth" if grown is None else "no limit is known")
    return forecast(grown, min(limits)) or Unknown("too uncertain to forecast")


def _grown(history: History, name: str, least: float) -> Growth | Unknown | None:
    """Returns the growth over the last half hour, five hours or day, whichever shows it first."""
    if isinstance(history.now(name), Unknown):
        return Unknown(NO_PROBE if name == "held" else f"{name} is not known now")
    unseen: Unknown | None = None
    is_level = False
    for points, often in WINDOWS:
        # The search is expensive, and over a long time little changes from one coarse point to the next.
        stamp, found = history.memo.get((name, points), (-often, None))
        if history.points - stamp >= often:
            held, load = (
                history.long(figure, points) if points else history.since(figure, LATELY_S) for figure in (name, "running")
            )
            # It takes the median of all slopes in the last half, which is at most eight times the range there over the
            # whole time: a smaller range needs no closer look. Two thirds instead of a half leave no doubt about where
            # the half begins.
            later = held.values[len(held.values) // 3 :]
            if held.span_s < SPAN_LEAST_S:
                found = Unknown(f"seen for {held.span_s / 60:.0f} min; growth needs 20 at least")
            elif not later or max(later) - min(later) < least / 8:
                found = None
            else:
                found = growth(held.times, held.values, least=least, load=load if load.times else None)
            history.memo[name, points] = history.points, found
        if isinstance(found, Growth):
            return found
        is_level = is_level or found is None
        unseen = found if unseen is None else unseen
    return None if is_level else unseen  # a long time may show more than the last half hour
