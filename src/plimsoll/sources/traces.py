"""Reads traffic: public trace formats, our own recordings, and measured runs. docs/traces.md describes each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from plimsoll.domain.arrivals import Arrivals, arrival_times, check_arrivals
from plimsoll.domain.measured_run import ABSENT, MeasuredRun, RunSeries
from plimsoll.domain.trace import Integers, Trace
from plimsoll.domain.trace_rows import IDS_MAX, pick, starts
from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.trace_columns import NO_STAMP, Columns, joined
from plimsoll.sources.trace_csv import csv_columns
from plimsoll.sources.trace_json import RECORDING_BLOCK, SHAPES, json_columns, json_shape
from plimsoll.sources.trace_lines import Lines, read_lines
from plimsoll.sources.trace_shapes import SIMPLEST, UNKNOWN, BadRow, csv_shape

KINDS = ("azure", "burstgpt", "lengths", *(shape.kind for shape in SHAPES))
_SERIES = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")


class _Format(NamedTuple):
    kind: str
    prefix_block: int
    """0: the rows say it."""
    parse: Callable[[list[str], int], Columns]
    """Of lines and the tokens an id covers as far as is known."""


class _Rows(NamedTuple):
    format: _Format
    columns: Columns
    bad: int


def read_trace(
    path: str,
    *,
    limit: int | None = None,
    prefix_block: int = 512,
    arrivals: Arrivals | None = None,
    skip_bad: bool = False,
    kind: str | None = None,
) -> Trace:
    """The requests of a file ("-": standard input), sorted by arrival, then cut to `limit`, the first at 0.

    `arrivals` says when requests come where the file does not, and replaces the file's own times where it does.
    One line of BadInput names the first row that cannot be read; with `skip_bad` such rows are counted instead.
    """
    rows = _read(path, prefix_block, kind, skip_bad=skip_bad)
    return _trace(path, rows, limit, arrivals)[0]


def read_measured(path: str, *, timeseries: str | None = None, limit: int | None = None, skip_bad: bool = False) -> MeasuredRun:
    """A run with its stamps: a recording that has them, or the per-request file of a measured run."""
    try:
        rows = _read(path, RECORDING_BLOCK, None, skip_bad=skip_bad)
    except BadInput as error:
        wanted = "a measured run: requests with stamps are wanted (docs/step-time.md)"
        raise type(error)(str(error).replace(UNKNOWN, wanted)) from None
    if not (len(rows.columns.stamps) and (rows.columns.stamps[:, :3] != NO_STAMP).any()):
        raise BadInput(f"{path}: no request says when it was scheduled, answered or done: not a measured run")
    trace, order, zero = _trace(path, rows, limit, None)
    found = rows.columns.stamps[order]
    is_there = found != NO_STAMP
    found[:, :3] -= np.where(is_there[:, :3], zero, 0)
    scheduled, first_token, finish, cached = np.where(is_there, found, ABSENT).T.copy()
    series = read_timeseries(timeseries) if timeseries is not None else None
    return MeasuredRun(trace, scheduled, first_token, finish, cached, series)


def read_timeseries(path: str) -> RunSeries:
    """The CSV with columns t, prompt_throughput, gen_throughput, running, waiting, kv_cache_pct."""
    rows: list[list[float]] = []
    places: list[int] = []
    for number, line in _texts(path):
        cells = [cell.strip() for cell in line.split(",")]
        if not places:
            if not set(_SERIES) <= set(cells):
                raise BadInput(f"{path}, line {number}: the columns of a time series are {','.join(_SERIES)}")
            places = [cells.index(name) for name in _SERIES]
            continue
        try:
            row = [float(cells[at]) for at in places]
        except (ValueError, IndexError):
            raise BadInput(f"{path}, line {number}: not {len(_SERIES)} numbers") from None
        if not all(0 <= value <= 1e12 for value in row):
            raise BadInput(f"{path}, line {number}: a number is out of range")
        rows.append(row)
    if not rows:
        raise BadInput(f"{path}: no row in it")
    at, prompt, output, running, waiting, percent = np.array(rows, dtype=np.float64).T.copy()
    return RunSeries(at, prompt, output, running.astype(np.int64), waiting.astype(np.int64), percent / 100)


def _texts(path: str) -> Iterator[tuple[int, str]]:
    for chunk in read_lines(path):
        for number, line in zip(chunk.numbers, chunk.lines, strict=True):
            try:
                yield number, line.decode("utf-8-sig")
            except UnicodeDecodeError:
                raise BadInput(f"{path}, line {number}: not text") from None


def _read(path: str, prefix_block: int, kind: str | None, *, skip_bad: bool) -> _Rows:
    if not 1 <= prefix_block <= 1 << 30:
        raise BadInput("--trace-block-size must be 1 or more tokens")
    if kind is not None and kind not in KINDS:
        raise BadInput(f"{kind[:40]!r} is no kind of trace: {', '.join(KINDS)}")
    parts: list[Columns] = []
    found: _Format | None = None
    bad = ids = 0
    for read in read_lines(path):
        chunk = read
        if found is None and chunk.lines:
            found, chunk = _format(path, chunk, prefix_block, kind)
        if found is None or not chunk.lines:
            continue
        for part in _columns(path, chunk, found, skip_bad=skip_bad):
            if part is None:
                bad += 1
                continue
            found = found._replace(prefix_block=found.prefix_block or part.prefix_block)
            parts.append(part)
            ids += len(part.ids)
        if ids > IDS_MAX:
            raise TooLarge(f"{path}: more than {IDS_MAX} prefix ids")
    if found is None or not parts:
        raise BadInput(f"{path}: no request in it" + (f" that can be read, {bad} bad rows" if bad else ""))
    columns = joined(parts)
    if not len(columns.prompt):
        raise BadInput(f"{path}: no request in it that was answered")
    return _Rows(found, columns, bad + columns.failed)


def _format(path: str, chunk: Lines, prefix_block: int, kind: str | None) -> tuple[_Format, Lines]:
    """What the first line shows the file to be, and the lines that are left to read."""
    where = f"{path}, line {chunk.numbers[0]}"
    try:
        first = _decoded(chunk.lines[:1])[0].removeprefix("\ufeff")
        if first.lstrip().startswith("{"):
            chunk = chunk._replace(lines=[first.encode("utf-8"), *chunk.lines[1:]])
            as_json = json_shape(first, kind)
            if as_json is not None:
                block = {"llmservingsim": 1, "recording": 0}.get(as_json.kind, prefix_block)
                return _Format(as_json.kind, block, lambda lines, known: json_columns(as_json, lines, known)), chunk
        else:
            as_csv = csv_shape(first, kind)
            if as_csv is not None:
                rest = Lines(chunk.numbers[1:], chunk.lines[1:])
                return _Format(as_csv.kind, prefix_block, lambda lines, _: csv_columns(as_csv, lines)), rest
    except (BadRow, UnicodeError) as error:
        raise BadInput(f"{where}: {error if isinstance(error, BadRow) else 'not text'}") from None
    wanted = f"a trace of kind {kind}" if kind else UNKNOWN
    raise BadInput(f"{where}: not {wanted}")


def _columns(path: str, chunk: Lines, found: _Format, *, skip_bad: bool) -> Iterator[Columns | None]:
    """The chunk's rows, None for each bad one. Halving finds the bad row, so that good ones are read by the thousand."""
    pending = [(0, len(chunk.lines))]
    known = found.prefix_block
    while pending:
        begin, end = pending.pop()
        try:
            part = found.parse(_decoded(chunk.lines[begin:end]), known)
        except BadRow as reason:
            if end - begin > 1:
                middle = (begin + end) // 2
                pending += [(middle, end), (begin, middle)]
                continue
            if not skip_bad:
                raise BadInput(f"{path}, line {chunk.numbers[begin]}: {reason}") from None
            yield None
        else:
            known = known or part.prefix_block
            yield part


def _decoded(lines: list[bytes]) -> list[str]:
    try:
        text = b"\n".join(lines).decode("utf-8")
    except UnicodeDecodeError:
        raise BadRow("not text") from None
    if "\r" in text:
        return [line.rstrip("\r") for line in text.split("\n")]
    return text.split("\n")


def _trace(path: str, rows: _Rows, limit: int | None, arrivals: Arrivals | None) -> tuple[Trace, Integers, int]:
    """The trace, the file's rows in its order, and the moment it counts from."""
    if limit is not None and limit < 1:
        raise BadInput("--limit must be 1 or more requests")
    columns = rows.columns
    count = len(columns.prompt)
    if len(columns.arrival):
        order = np.argsort(columns.arrival, kind="stable")[:limit]
        times = columns.arrival[order]
    else:
        order = np.arange(count)[:limit]
        times = np.zeros(len(order), dtype=np.int64)
        if arrivals is None:
            how = f"a CSV says it in a column arrived_at (seconds), or in the columns {SIMPLEST} (dates)"
            missing = "says how long requests are, not when they come: give --rate X (and --arrivals), or --arrivals at-once"
            raise BadInput(f"{path}: {missing}; {how}")
    zero = int(times[0])
    if arrivals is not None:
        check_arrivals(arrivals)
        times = arrival_times(arrivals, len(order))
        zero = 0
    prompt, output = np.maximum(columns.prompt, 1), np.maximum(columns.output, 1)
    block = columns.prefix_block or rows.format.prefix_block or RECORDING_BLOCK
    name = "standard input" if path == "-" else PurePath(path).name
    arrival = columns.arrival if len(columns.arrival) else np.zeros(count, dtype=np.int64)
    whole = Trace(name, arrival, prompt, output, columns.priority, columns.ids, starts(columns.id_counts), block, rows.bad)
    return pick(whole, order)._replace(arrival_ns=times - zero), order, zero
