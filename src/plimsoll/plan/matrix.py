"""What fits for every context and every concurrency: one plan a context, one answer a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings
from plimsoll.units import format_count, parse_vllm_integer, shortened

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
        found: dict[str, tuple[int, ...]] = {}
        for part in text.split():
            name, equals, values = part.partition("=")
            if not equals or name not in _LIMITS or name in found:
                wrong = "is given twice" if name in found else "is neither context= nor concurrency="
                raise BadInput(f"--matrix: {shortened(part)} {wrong}; for example {_EXAMPLE}")
            found[name] = tuple(sorted(set(_values(name, values))))
            if len(found[name]) > MOST_VALUES:
                many = f"{len(found[name])} values are more than the {MOST_VALUES} that are planned at once"
                raise BadInput(f"--matrix {name}: {many}")
        if absent := next((name for name in _LIMITS if name not in found), None):
            raise BadInput(f"--matrix says no {absent}=; for example {_EXAMPLE}")
        return cls(found["context"], found["concurrency"])


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


class _Column(NamedTuple):
    """One context, planned."""

    context: int
    blocks: int = 0  # of one request
    half_blocks: int = 0  # of one that has half its length
    usable: int = 0
    usable_low: int = 0
    engines: int = 1
    max_num_seqs: int = 0
    refused: str = ""


def plan_matrix(
    spec: MatrixSpec, settings: Settings, replan: Replan, *, longest: int | None = None, progress: Progress | None = None
) -> Matrix:
    """Plan every cell; `longest` is the model's own limit, beyond which vLLM refuses --max-model-len."""
    columns = []
    for done, context in enumerate(spec.contexts):
        if progress is not None:
            progress(done, len(spec.contexts))
        columns.append(_column(context, settings, replan, longest))
    if progress is not None:
        progress(len(spec.contexts), len(spec.contexts))
    rows = tuple(tuple(_cell(column, number) for column in columns) for number in spec.concurrencies)
    at_once = (column.usable // column.blocks * column.engines if column.blocks else None for column in columns)
    return Matrix(spec, rows, tuple(at_once))


def _column(context: int, settings: Settings, replan: Replan, longest: int | None) -> _Column:
    if longest is not None and context > longest:
        return _Column(context, refused=f"the model takes at most {format_count(longest)} tokens")
    try:
        ledger = replan(replace(settings, max_model_len=context))
        half = replan(replace(settings, max_model_len=-(-context // 2)))
    except BadInput as error:
        return _Column(context, refused=str(error))
    plan = ledger.kv_plan
    if not ledger.fits:
        why = "one request of this length does not fit" if ledger.kv.value > 0 else "nothing is left for the KV cache"
        return _Column(context, refused=f"{why}: vLLM does not start")
    cost = max(plan.bytes_per_block_by_rank)
    exact = not cost or ledger.settings.num_gpu_blocks_override is not None
    low = plan.num_blocks if exact else min(plan.num_blocks, max(0, ledger.kv.low // cost))
    return _Column(
        context=context,
        blocks=plan.blocks_per_request,
        half_blocks=half.kv_plan.blocks_per_request,
        usable=max(0, plan.num_blocks - 1),
        usable_low=max(0, low - 1),
        engines=ledger.settings.data_parallel,
        max_num_seqs=ledger.settings.max_num_seqs,
    )


def _cell(column: _Column, concurrency: int) -> Cell:
    tokens = column.context * concurrency
    if column.refused:
        return Cell(column.context, concurrency, CellState.NO, False, None, tokens, 0, column.refused)  # noqa: FBT003
    number = -(-concurrency // column.engines)
    needed = number * column.blocks
    waits = max(0, concurrency - column.max_num_seqs * column.engines)
    use = needed / column.usable if column.usable else None
    if needed <= column.usable_low:
        state, why = CellState.FITS, "every request has its full length at once"
    elif needed <= column.usable:
        state, why = CellState.RISK, "fits by the central figure, not at the low end of the KV band"
    elif number * column.half_blocks <= column.usable:
        state, why = CellState.RISK, "fits while requests are half grown on average, not when all have their full length"
    else:
        state, why = CellState.NO, "the pool holds fewer, even half grown: the rest waits"
    return Cell(column.context, concurrency, state, starts=True, use=use, tokens=tokens, waits=waits, why=why)


def _values(name: str, text: str) -> Iterator[int]:
    for item in text.split(","):
        ends = []
        for part in item.split("..", 1):
            try:
                ends.append(parse_vllm_integer(part))
            except BadInput as error:
                raise BadInput(f"--matrix {name}: {error}") from None
            if not 1 <= ends[-1] <= _LIMITS[name]:
                raise BadInput(f"--matrix {name}: {shortened(part)} must lie between 1 and {_LIMITS[name]}")
        start, end = ends[0], ends[-1]
        if end < start:
            raise BadInput(f"--matrix {name}: the range {shortened(item)} runs backwards")
        while start < end:
            yield start
            start *= 2
        yield end
