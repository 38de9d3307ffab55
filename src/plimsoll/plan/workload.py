"""Will so many requests of this size fit at once, and what does paging save? Also the grid of contexts and concurrencies.

    prompt ──────────────> prompt + output              blocks of one request, by the KV plan's own arithmetic
    | settled at the prompt | settled at the end | most   "settled": decoding, windows have slid
                                                   └── what vLLM's start-up check counts, a batch in flight included

A request is counted at prompt + output tokens. vLLM allocates as outputs grow, so prompts that fit may still be preempted
before they end. A shortage of blocks makes requests wait or be preempted; it is never an out-of-memory error.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.options import whole
from plimsoll.plan.kv import GroupPlan, KvPlan, plan_kv
from plimsoll.plan.kv_layers import RankSpecs, state_mode_of
from plimsoll.plan.ledger import Ledger, ModelFacts, cache_specs
from plimsoll.plan.settings import Settings
from plimsoll.units import format_count, round_up, shortened

BLOCK_SIZES = (8, 16, 32, 64, 128)
MOST_TOKENS, MOST_REQUESTS = 10**9, 10**7
_GROW_ALONE = {"full", "mla", "indexer", "state"}
_EXAMPLE = "prompt=1200,output=300,concurrency=64"
_LIMITS = {"prompt": MOST_TOKENS, "output": MOST_TOKENS, "concurrency": MOST_REQUESTS}


def named_values(
    option: str, words: Iterable[str], needed: Sequence[str], others: Sequence[str], example: str
) -> dict[str, str]:
    """The values of `name=value` words, each name once; BadInput where one is unknown, comes twice or is missing."""
    found: dict[str, str] = {}
    known = [f"{name}=" for name in (*needed, *others)]
    for word in words:
        name, equals, value = word.partition("=")
        if name in found:
            raise BadInput(f"{option}: {shortened(word)} is given twice; for example {example}")
        if not equals or f"{name}=" not in known:
            raise BadInput(f"{option}: {shortened(word)} is not one of {', '.join(known)}; for example {example}")
        found[name] = value
    for name in needed:
        if name not in found:
            raise BadInput(f"{option} says no {name}=; for example {example}")
    return found


class WorkloadVerdict(StrEnum):
    """The outcome for a workload."""

    FITS = "fits"
    PREEMPTS = "may-preempt"  # the prompts fit, all requests at their end do not: some may be preempted and computed again
    NO = "does-not-fit"  # not even the prompts fit at once: the rest waits
    TOO_LONG = "too-long"  # no request is as short as --max-model-len allows: vLLM refuses them
    NO_START = "does-not-start"

    @property
    def is_fine(self) -> bool:
        return self is WorkloadVerdict.FITS


class Workload(NamedTuple):
    """Requests as (prompt, output) tokens, one pair where all are alike, and how many run at once (None: not given)."""

    requests: tuple[tuple[int, int], ...]
    concurrency: int | None = None

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read `prompt=1200,output=300,concurrency=64`; the concurrency may be left out."""
        words = re.split(r"[,\s]+", text.strip())
        given = named_values("--workload", words, ("prompt", "output"), ("concurrency",), _EXAMPLE)
        found = {name: whole(value, f"--workload {name}", 1, _LIMITS[name]) for name, value in given.items()}
        return cls(((found["prompt"], found["output"]),), found.get("concurrency"))

    @classmethod
    def from_trace(cls, pairs: Iterable[tuple[int, int]], concurrency: int | None = None) -> Workload:
        """Requests as they were recorded."""
        requests = tuple(pairs)
        if not requests:
            raise BadInput("--workload: the trace has no request")
        for number, (prompt, output) in enumerate(requests, start=1):
            if not (1 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
                raise BadInput(f"--workload: request {number} of the trace has {prompt} prompt and {output} output tokens")
        if concurrency is not None and not 1 <= concurrency <= MOST_REQUESTS:
            raise BadInput(f"--workload concurrency: {concurrency} must lie between 1 and {MOST_REQUESTS}")
        return cls(requests, concurrency)


class Waste(NamedTuple):
    """Unfilled slots of a request's last block."""

    block_size: int
    in_force: bool
    slots: float  # at the requests' end, on average over them
    last_block_empty: float  # the same as a share of the block
    share: float  # the same as a share of all slots taken
    uniform_slots: float  # on average where every length is equally likely: (block - 1) / 2
    uniform_share: float


class Pool(NamedTuple):
    """The blocks of one engine, and how to count those of a request."""

    plan: KvPlan
    specs: Sequence[RankSpecs]
    settings: Settings
    blocks_low: int
    blocks_high: int
    starts: bool = True

    @property
    def usable(self) -> int:
        """Blocks that requests can have: vLLM keeps block 0 for itself."""
        return max(0, self.plan.num_blocks - 1)


@dataclass(frozen=True)
class WorkloadAnswer:
    """A plan's answer about a workload; counts are of all engines together, blocks and bytes of one GPU."""

    workload: Workload
    verdict: WorkloadVerdict
    at_once: int | None  # requests that fit at their end, even if the largest come together; None: the model keeps no cache
    at_once_low: int | None
    at_once_high: int | None
    at_once_typical: int | None  # the same for the average mixture
    at_once_settled: int | None  # the same once all of them decode: windows have slid, nothing is in flight
    at_once_prompts: int | None  # how many fit when each has just its prompt
    largest_tokens: int
    largest_groups: tuple[GroupPlan, ...]  # blocks of the largest request, group by group
    blocks_per_request: float
    usable_blocks: int
    use_at_prompt: float | None  # share of the pool at the asked concurrency; above 1 it does not fit
    use_at_end: float | None
    counted: int  # the number of requests on one engine that the following bytes are for
    paged_bytes: int
    reserved_bytes: int  # what `counted` requests take if each reserves max_model_len
    reserved_at_once: int | None
    waste: tuple[Waste, ...]
    too_long: int  # requests longer than max_model_len, left out of everything else
    max_model_len: int
    waits: int  # requests beyond --max-num-seqs, which wait whatever the cache has

    @property
    def saved_share(self) -> float:
        return 1 - self.paged_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def pool_of(ledger: Ledger, model: ModelFacts) -> Pool:
    plan = ledger.kv_plan
    cost = max(plan.bytes_per_block_by_rank)
    exact = cost == 0 or ledger.settings.num_gpu_blocks_override is not None
    low, high = (plan.num_blocks if exact else max(0, end // cost) for end in (ledger.kv.low, ledger.kv.high))
    return Pool(plan, cache_specs(model, ledger.settings), ledger.settings, low, high, starts=ledger.fits)


def judge(workload: Workload, pool: Pool) -> WorkloadAnswer:
    """Returns the answer for the workload on a launch with this cache."""
    limit = pool.plan.max_model_len
    served = [request for request in workload.requests if sum(request) <= limit]
    kept = served or list(workload.requests)
    count = _counter(pool)
    # Only windows and chunks hold less once they have slid.
    settled = count if {group.kind for group in pool.plan.groups} <= _GROW_ALONE else _counter(pool, is_settled=True)
    prompts = _Load(settled(prompt) for prompt, _ in kept)
    ends_settled = _Load(settled(prompt + output) for prompt, output in kept)
    ends = _Load(count(prompt + output) for prompt, output in kept)
    engines = pool.settings.data_parallel
    wanted = None if workload.concurrency is None else -(-workload.concurrency // engines)
    largest = max(sum(request) for request in kept)
    counted = wanted if wanted is not None else ends.fit_together(pool.usable) or 1
    reserved = pool.plan.blocks_per_request
    # Tokens of a block in each group that keeps tokens; a state fills its block.
    sizes = {group.block_size * pool.settings.decode_context_parallel for group in pool.plan.groups if group.kind != "state"}

    if not pool.starts:
        verdict = WorkloadVerdict.NO_START
    elif not served:
        verdict = WorkloadVerdict.TOO_LONG
    elif ends.together(wanted or 1) <= pool.usable:
        verdict = WorkloadVerdict.FITS
    elif (wanted or 1) * prompts.total <= pool.usable * prompts.number:
        verdict = WorkloadVerdict.PREEMPTS
    else:
        verdict = WorkloadVerdict.NO

    def everywhere(number: int | None) -> int | None:
        return None if number is None else number * engines

    def share(blocks: float) -> float | None:
        return None if wanted is None or not pool.usable else blocks * wanted / pool.usable

    return WorkloadAnswer(
        workload=workload,
        verdict=verdict,
        at_once=everywhere(ends.fit_together(pool.usable)),
        at_once_low=everywhere(ends.fit_together(max(0, pool.blocks_low - 1))),
        at_once_high=everywhere(ends.fit_together(max(0, pool.blocks_high - 1))),
        at_once_typical=everywhere(ends.fit_on_average(pool.usable)),
        at_once_settled=everywhere(ends_settled.fit_on_average(pool.usable)),
        at_once_prompts=everywhere(prompts.fit_on_average(pool.usable)),
        largest_tokens=largest,
        largest_groups=_plan_at(pool, largest).groups,
        blocks_per_request=ends.mean,
        usable_blocks=pool.usable,
        use_at_prompt=share(prompts.mean),
        use_at_end=share(ends.mean),
        counted=counted,
        paged_bytes=round(counted * ends.mean * pool.plan.bytes_per_block),
        reserved_bytes=counted * reserved * pool.plan.bytes_per_block,
        reserved_at_once=pool.usable // reserved * engines if reserved else None,
        waste=waste_of([sum(request) for request in kept], sizes),
        too_long=len(workload.requests) - len(served),
        max_model_len=limit,
        waits=max(0, (workload.concurrency or 0) - pool.settings.max_num_seqs * engines),
    )


def waste_of(lengths: Sequence[int], in_force: Iterable[int] = ()) -> tuple[Waste, ...]:
    """The unfilled slots of requests of these lengths, by block size."""
    found, used = [], set(in_force)
    mean = sum(lengths) / len(lengths)
    for size in sorted({*BLOCK_SIZES, *used}):
        slots, uniform = sum(-length % size for length in lengths) / len(lengths), (size - 1) / 2
        shares = slots / (mean + slots), uniform, uniform / (mean + uniform)
        found.append(Waste(size, size in used, slots, slots / size, *shares))
    return tuple(found)


class _Load:
    """Blocks of each request of a workload; the workload repeats for any number of requests."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._largest_first = list(accumulate(sorted(blocks, reverse=True), initial=0))
        self.total = self._largest_first[-1]
        self.number = len(self._largest_first) - 1
        self.mean = self.total / self.number

    def together(self, number: int) -> int:
        rounds, rest = divmod(number, self.number)
        return rounds * self.total + self._largest_first[rest]

    def fit_together(self, blocks: int) -> int | None:
        if not self.total:
            return None
        rounds, rest = divmod(blocks, self.total)
        return rounds * self.number + bisect_right(self._largest_first, rest) - 1

    def fit_on_average(self, blocks: int) -> int | None:
        return blocks * self.number // self.total if self.total else None


def _plan_at(pool: Pool, length: int, *, is_settled: bool = False) -> KvPlan:
    batch = 1 + pool.settings.speculative_tokens if is_settled else pool.settings.max_num_batched_tokens
    settings = replace(pool.settings, max_model_len=length, max_num_batched_tokens=batch)
    return plan_kv(pool.specs, settings, 0, longest=1)


def _counter(pool: Pool, *, is_settled: bool = False) -> Callable[[int], int]:
    """Blocks of a request by its length; lengths that end in the same block are counted once."""
    by_length = state_mode_of(pool.settings) == "all"  # states are then kept along the whole request
    step = math.gcd(*(group.block_size for group in pool.plan.groups if by_length or group.kind != "state")) or 1
    known: dict[int, int] = {}

    def count(length: int) -> int:
        end = round_up(length, step)
        if end not in known:
            known[end] = _plan_at(pool, end, is_settled=is_settled).blocks_per_request
        return known[end]

    return count


# The grid of every context and every concurrency: one plan a context, one answer a cell.

MOST_VALUES = 64  # of one axis
_MATRIX_LIMITS = {"context": MOST_TOKENS, "concurrency": MOST_REQUESTS}
_MATRIX_EXAMPLE = "context=8k,32k,128k concurrency=8..256"
Replan = Callable[[Settings], Ledger]


class MatrixSpec(NamedTuple):
    """The two axes, each in rising order."""

    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> MatrixSpec:
        """Read `context=8k,32k,128k concurrency=8..256`: lists, and ranges that double from a to b."""
        given = named_values("--matrix", text.split(), ("context", "concurrency"), (), _MATRIX_EXAMPLE)
        axes = {name: tuple(sorted(set(_values(name, values)))) for name, values in given.items()}
        for name, axis in axes.items():
            if len(axis) > MOST_VALUES:
                many = f"{len(axis)} values are more than the {MOST_VALUES} that are planned at once"
                raise BadInput(f"--matrix {name}: {many}")
        return cls(axes["context"], axes["concurrency"])


class CellState(StrEnum):
    """The outcome for a number of requests of the full context at once."""

    FITS = "fits"
    RISK = "preemption-risk"
    NO = "does-not-fit"


class Cell(NamedTuple):
    """One context and one concurrency."""

    context: int
    concurrency: int
    state: CellState
    starts: bool
    use: float | None
    """Share of the pool when every request has its full context; above 1 it does not fit, None: there is no pool."""
    tokens: int
    waits: int  # requests beyond --max-num-seqs
    why: str


class Matrix(NamedTuple):
    """The grid: a row for each concurrency, a column for each context."""

    spec: MatrixSpec
    rows: tuple[tuple[Cell, ...], ...]
    at_once: tuple[int | None, ...]
    """For each context the most requests that fit; None: it does not start, or the model keeps no cache."""


def plan_matrix(spec: MatrixSpec, settings: Settings, replan: Replan, *, longest: int | None = None) -> Matrix:
    """Plan every cell; `longest` is the model's own limit, beyond which vLLM refuses --max-model-len."""
    columns = [_column(context, spec.concurrencies, settings, replan, longest) for context in spec.contexts]
    rows = zip(*(cells for cells, _ in columns), strict=True)
    return Matrix(spec, tuple(rows), tuple(most for _, most in columns))


def _column(
    context: int, concurrencies: tuple[int, ...], settings: Settings, replan: Replan, longest: int | None
) -> tuple[list[Cell], int | None]:
    """The cells of one context, and the most requests that fit."""
    refused, cells = "", []
    if longest is not None and context > longest:
        refused = f"the model takes at most {format_count(longest)} tokens"
    else:
        try:
            ledger = replan(replace(settings, max_model_len=context))
            half = replan(replace(settings, max_model_len=-(-context // 2))).kv_plan.blocks_per_request
            if not ledger.fits:
                why = "one request of this length does not fit" if ledger.kv.value > 0 else "nothing is left for the KV cache"
                refused = f"{why}: vLLM does not start"
        except BadInput as error:
            refused = str(error)
    if refused:
        none: dict[str, Any] = {"starts": False, "use": None, "waits": 0, "why": refused}
        return [Cell(context, count, CellState.NO, tokens=context * count, **none) for count in concurrencies], None
    plan, engines = ledger.kv_plan, ledger.settings.data_parallel
    cost = max(plan.bytes_per_block_by_rank)
    exact = not cost or ledger.settings.num_gpu_blocks_override is not None
    usable = max(0, plan.num_blocks - 1)  # vLLM keeps one
    low = usable if exact else min(usable, max(0, ledger.kv.low // cost - 1))
    for concurrency in concurrencies:
        number = -(-concurrency // engines)
        needed = number * plan.blocks_per_request
        if needed <= low:
            state, why = CellState.FITS, "every request has its full length at once"
        elif needed <= usable:
            state, why = CellState.RISK, "fits by the central figure, not at the low end of the KV band"
        elif number * half <= usable:
            state, why = CellState.RISK, "fits while requests are half grown on average, not when all have their full length"
        else:
            state, why = CellState.NO, "the pool holds fewer, even half grown: the rest waits"
        waits = max(0, concurrency - ledger.settings.max_num_seqs * engines)
        use, tokens = needed / usable if usable else None, context * concurrency
        cells.append(Cell(context, concurrency, state, starts=True, use=use, tokens=tokens, waits=waits, why=why))
    return cells, usable // plan.blocks_per_request * engines if plan.blocks_per_request else None


def _values(name: str, text: str) -> Iterator[int]:
    for item in text.split(","):
        ends = [whole(part, f"--matrix {name}", 1, _MATRIX_LIMITS[name]) for part in item.split("..", 1)]
        start, end = ends[0], ends[-1]
        if end < start:
            raise BadInput(f"--matrix {name}: the range {shortened(item)} runs backwards")
        while start < end:
            yield start
            start *= 2
        yield end
