"""Traffic made out of traffic: a window of it, some of its requests, or several services on one engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput, TooLarge
from plimsoll.simulate.trace import (
    IDS_MAX,
    LATEST_NS,
    PROCESSES,
    Arrivals,
    Integers,
    Trace,
    arrival_times,
    blocks_of,
    pick,
    places,
    starts,
    tuples,
)

# Synthetic traffic: seeded lengths, arrivals, shared beginnings and conversations.
#
# synthetic:requests=10000,rate=20,prompt=1000,output=250,families=8,family_tokens=512,turns=4
#
# Each quantity has a random generator of its own, so that another output length leaves the arrivals as they were.

SCHEME = "synthetic:"
REQUESTS_MAX = 50_000_000
TOKENS_MAX = 1_000_000_000
_PROMPT, _OUTPUT, _FAMILY, _THINK, _PRIORITY = range(1, 6)


class Synthetic(NamedTuple):
    """A specification of traffic, by its keys. Lengths are lognormal: a mean, and the sigma of the logarithm (0: all alike)."""

    requests: int = 1000
    rate: float = 10.0  # Requests of all turns together in a second, on average
    arrivals: str = "poisson"
    burstiness: float = 0.25
    prompt: float = 1000.0  # Of a request's own text: without the shared beginning and the earlier turns
    prompt_sigma: float = 1.0
    output: float = 250.0
    output_sigma: float = 0.8
    prompt_max: int = 8192
    output_max: int = 2048
    families: int = 0  # Shared beginnings; each conversation has one of them
    family_tokens: int = 512  # Length of a shared beginning; the part that does not fill a block is not shared
    turns: int = 1  # Requests of a conversation: each repeats all before it. One that outgrows `prompt_max` starts anew.
    think: float = 10.0  # Mean seconds between two turns
    block: int = 16  # Tokens that a prefix id covers
    priorities: int = 1  # Requests are spread over priorities 0 to this, less one
    seed: int = 0


# The least and the most that each number may be.
_BOUNDS: dict[str, tuple[float, float]] = {
    "requests": (1, REQUESTS_MAX), "rate": (1e-9, 1e9), "burstiness": (0.001, 1000), "prompt": (1, TOKENS_MAX),
    "prompt_sigma": (0, 10), "prompt_max": (1, TOKENS_MAX), "output": (1, TOKENS_MAX), "output_sigma": (0, 10),
    "output_max": (1, TOKENS_MAX), "families": (0, 1_000_000), "family_tokens": (0, TOKENS_MAX), "turns": (1, 10_000),
    "think": (0, 1e7), "block": (1, 1 << 20), "priorities": (1, 1000), "seed": (0, (1 << 63) - 1),
}  # fmt: skip


def parse_synthetic(text: str) -> Synthetic:
    """The specification in `synthetic:key=value,...`; keys left out keep their defaults."""
    defaults, values = Synthetic()._asdict(), dict[str, int | float | str]()
    for part in text.removeprefix(SCHEME).split(","):
        if not part.strip():
            continue
        key, equals, said = (piece.strip() for piece in part.partition("="))
        if key not in defaults or not equals:
            raise BadInput(f"{SCHEME} {key[:40]!r} is not one of {', '.join(defaults)} (as key=value)")
        if key in values:
            raise BadInput(f"{SCHEME} {key} is given twice")
        read = type(defaults[key])
        try:
            values[key] = read(said)
        except ValueError:
            raise BadInput(f"{SCHEME} {key}={said[:40]!r} is not a {'whole number' if read is int else 'number'}") from None
    spec = Synthetic(**values)  # type: ignore[arg-type]
    _check(spec)
    return spec


def _check(spec: Synthetic) -> None:
    for key, (least, most) in _BOUNDS.items():
        if not least <= getattr(spec, key) <= most:
            raise BadInput(f"{SCHEME} {key} must lie between {least:g} and {most:g}")
    if spec.arrivals not in PROCESSES:
        raise BadInput(f"{SCHEME} arrivals is one of {', '.join(PROCESSES)}, not {spec.arrivals[:40]!r}")
    if spec.families and spec.family_tokens >= spec.prompt_max:
        raise BadInput(f"{SCHEME} family_tokens must be below prompt_max ({spec.prompt_max})")


def generate(spec: Synthetic) -> Trace:
    """The trace; the same specification gives the same trace."""
    _check(spec)
    conversation, turn = np.divmod(np.arange(spec.requests, dtype=np.int64), spec.turns)
    arrival = _arrivals(spec, conversation, turn)
    said = _lengths(_dice(spec, _PROMPT), spec.requests, spec.prompt, spec.prompt_sigma, spec.prompt_max)
    output = _lengths(_dice(spec, _OUTPUT), spec.requests, spec.output, spec.output_sigma, spec.output_max)
    # A turn repeats all before it, and continues the thread's text unless it would outgrow `prompt_max`.
    prompt = np.minimum((spec.family_tokens if spec.families else 0) + said, spec.prompt_max)
    thread = np.arange(spec.requests, dtype=np.int64)
    for nth in range(1, spec.turns):
        now = np.arange(nth, spec.requests, spec.turns)
        longer = prompt[now - 1] + output[now - 1] + said[now]
        goes_on = now[longer <= spec.prompt_max]
        prompt[goes_on] = longer[longer <= spec.prompt_max]
        thread[goes_on] = thread[goes_on - 1]
    priority = _dice(spec, _PRIORITY).integers(0, spec.priorities, spec.requests, dtype=np.int64)
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order]
    trace = Trace(
        "synthetic", arrival - arrival[0], prompt[order], output[order], priority[order], np.zeros_like(priority),
        tuples([()] * spec.requests), np.zeros(0, dtype=np.int64), np.zeros(spec.requests + 1, dtype=np.int64), spec.block,
    )  # fmt: skip
    if not spec.families and spec.turns == 1:
        return trace
    # Blocks of the shared beginning have the family's number, the others the thread's.
    conversation, thread = conversation[order], thread[order]
    blocks = blocks_of(trace.prompt, spec.block)
    if blocks.sum() > IDS_MAX:
        raise TooLarge(f"{SCHEME} more than {IDS_MAX} prefix ids; take a larger block than {spec.block}")
    shared, family = np.zeros_like(blocks), np.zeros_like(blocks)
    if spec.families:
        shared = np.minimum(blocks, spec.family_tokens // spec.block)
        family = _dice(spec, _FAMILY).integers(0, spec.families, int(conversation.max()) + 1, dtype=np.int64)[conversation]
    numbers = np.stack([family, thread + spec.families], axis=1).ravel()
    ids = np.repeat(numbers, np.stack([shared, blocks - shared], axis=1).ravel())
    return trace._replace(prefix_ids=ids, prefix_start=starts(blocks))


def _dice(spec: Synthetic, which: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([spec.seed, which])))


def _lengths(dice: np.random.Generator, count: int, mean: float, sigma: float, most: int) -> Integers:
    drawn = np.exp(math.log(mean) - sigma * sigma / 2 + sigma * dice.standard_normal(count))
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def _arrivals(spec: Synthetic, conversation: Integers, turn: Integers) -> Integers:
    """Conversations begin by the process; each later turn comes after a think time."""
    count = int(conversation[-1]) + 1
    process = Arrivals(spec.arrivals, spec.rate / spec.turns, spec.seed, spec.burstiness)
    begin = arrival_times(process, count)[conversation]
    if spec.turns == 1:
        return begin
    think = np.rint(_dice(spec, _THINK).standard_exponential(spec.requests) * (spec.think * 1e9)).astype(np.int64)
    think[turn == 0] = 0
    passed = np.cumsum(think)
    arrival: Integers = begin + passed - passed[turn == 0][conversation]
    if arrival.max() > LATEST_NS:
        raise BadInput(f"{SCHEME} the last request would arrive after a hundred years")
    return arrival


def cut(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive from `start_s` on and before `end_s`, with `start_s` as the new 0."""
    if not (math.isfinite(start_s) and 0 <= start_s < end_s):
        raise BadInput(f"a window goes from 0 or later to a later moment, not from {start_s:g} to {end_s:g} s")
    start_ns, end_ns = (round(min(second * 1e9, LATEST_NS)) for second in (start_s, end_s))
    first, last = np.searchsorted(trace.arrival_ns, [start_ns, end_ns])
    if first == last:
        raise BadInput(f"{trace.name}: no request arrives between {start_s:g} and {end_s:g} s")
    return _slice(trace, int(first), int(last), start_ns)


def take(trace: Trace, first: int, count: int) -> Trace:
    """`count` requests (or as many as there are) beginning with number `first`, which arrives at 0."""
    if first < 0 or count < 1 or first >= trace.size:
        raise BadInput(f"{trace.name}: has requests 0 to {trace.size - 1}; cannot take {count} from number {first} on")
    return _slice(trace, first, min(trace.size, first + count), int(trace.arrival_ns[first]))


def _slice(trace: Trace, first: int, last: int, zero_ns: int) -> Trace:
    begin, end = trace.prefix_start[first], trace.prefix_start[last]
    return trace._replace(
        arrival_ns=trace.arrival_ns[first:last] - zero_ns,
        prompt=trace.prompt[first:last],
        output=trace.output[first:last],
        priority=trace.priority[first:last],
        adapter=trace.adapter[first:last],
        images=trace.images[first:last],
        prefix_ids=trace.prefix_ids[begin:end],
        prefix_start=trace.prefix_start[first : last + 1] - begin,
    )


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests on one engine in order of arrival; at one instant the earlier trace goes first.

    Content is shared within a trace as before and never between two: their ids are numbered anew, side by side.
    """
    if not traces:
        raise BadInput("nothing to merge")
    sharing = [trace.prefix_block for trace in traces if trace.shares_content]
    block = math.gcd(*sharing) if sharing else traces[0].prefix_block
    ids: list[Integers] = []
    counts: list[Integers] = []
    used = total = 0
    for trace in traces:
        distinct, numbers = np.unique(trace.prefix_ids, return_inverse=True)
        numbers, kept = numbers + used, np.diff(trace.prefix_start)
        used += len(distinct)
        if trace.shares_content and trace.prefix_block != block:
            # The same content in smaller blocks: all tokens of a block are alike, so a block of 512 is 32 equal ones of 16.
            times = trace.prefix_block // block
            kept = np.minimum(kept * times, blocks_of(trace.prompt, block))
            numbers = numbers[places(trace.prefix_start[:-1] * times, kept) // times]
        total += len(numbers)
        if total > IDS_MAX:
            raise TooLarge(f"merged in blocks of {block} tokens there are more than {IDS_MAX} prefix ids")
        ids.append(numbers)
        counts.append(kept)
    columns = (np.concatenate(column) for column in zip(*(trace[1:7] for trace in traces), strict=True))
    name, bad_rows = " + ".join(trace.name for trace in traces), sum(trace.bad_rows for trace in traces)
    whole = Trace._make((name, *columns, np.concatenate(ids), starts(np.concatenate(counts)), block, bad_rows))
    return pick(whole, np.argsort(whole.arrival_ns, kind="stable"))
