"""What fits for every context and every concurrency: one plan a context, one answer a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings
from plimsoll.plan.workload import named_values, whole_number
from plimsoll.units import format_count, shortened

MOST_VALUES = 64  # of one axis
_LIMITS = {"context": 10**9, "concurrency": 10**7}
_EXAMPLE = "context=8k,32k,128k concurrency=8..256"
Replan = Callable[[Settings], Ledger]
Progress = Callable[[int, int], None]  # plans done, plans in all


class MatrixSpec(NamedTuple):
    """The two axes, each in rising order."""

    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> MatrixSpec:
        """Read `context=8k,32k,128k concurrency=8..256`: lists, and ranges that double from a to b."""
        given = named_values("--matrix", text.split(), ("context", "concurrency"), (), _EXAMPLE)
        axes = {name: tuple(sorted(set(_values(name, values)))) for name, values in given.items()}
        for name, axis in axes.items():
            if len(axis) > MOST_VALUES:
                many = f"{len(axis)} values are more than the {MOST_VALUES} that are planned at once"
                raise BadInput(f"--matrix {name}: {many}")
        return cls(axes["context"], axes["concurrency"])


class CellState(StrEnum):
    """What becomes of so many requests of the full context at once."""

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


def plan_matrix(
    spec: MatrixSpec, settings: Settings, replan: Replan, *, longest: int | None = None, progress: Progress | None = None
) -> Matrix:
    """Plan every cell; `longest` is the model's own limit, beyond which vLLM refuses --max-model-len."""
    columns, at_once = [], []
    for done, context in enumerate(spec.contexts):
        if progress is not None:
            progress(done, len(spec.contexts))
        cells, most = _column(context, spec.concurrencies, settings, replan, longest)
        columns.append(cells)
        at_once.append(most)
    if progress is not None:
        progress(len(spec.contexts), len(spec.contexts))
    return Matrix(spec, tuple(zip(*columns, strict=True)), tuple(at_once))


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
        ends = [whole_number(f"--matrix {name}", part, _LIMITS[name]) for part in item.split("..", 1)]
        start, end = ends[0], ends[-1]
        if end < start:
            raise BadInput(f"--matrix {name}: the range {shortened(item)} runs backwards")
        while start < end:
            yield start
            start *= 2
        yield end
