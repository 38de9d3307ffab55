"""Reads traffic: public trace formats, our own recordings, and measured runs. docs/traces.md describes each of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput, TooLarge
from plimsoll.simulate.trace import (
    ABSENT,
    IDS_MAX,
    Arrivals,
    Integers,
    MeasuredRun,
    RunSeries,
    Trace,
    arrival_times,
    blocks_of,
    check_arrivals,
    pick,
    places,
    starts,
)
from plimsoll.simulate.trace_columns import (
    NO_STAMP,
    NOTHING,
    OUTPUT_NAMES,
    PROMPT_NAMES,
    SIMPLEST,
    UNKNOWN,
    BadRow,
    Columns,
    CsvShape,
    Lines,
    arrivals_ns,
    csv_cells,
    csv_shape,
    dates_ns,
    ids_as_numbers,
    joined,
    plain_columns,
    read_lines,
    seconds_ns,
    whole_cell,
    whole_numbers,
)

# Traces as CSV: Azure's, BurstGPT's, and files that only say how long the requests are.


def csv_columns(shape: CsvShape, lines: list[str]) -> Columns:
    """The rows as columns, or BadRow."""
    cells = csv_cells(shape.width, lines)
    prompt = _numbers(cells[shape.prompt], shape.names[1])
    output = _numbers(cells[shape.output], shape.names[2])
    arrival = NOTHING if shape.stamp is None else _stamps(shape, cells[shape.stamp])
    if shape.kind != "burstgpt":
        return plain_columns(arrival, prompt, output)
    answered = output > 0
    return plain_columns(arrival[answered], prompt[answered], output[answered])._replace(failed=int(np.sum(~answered)))


def _numbers(cells: list[str], name: str) -> Integers:
    if "_" in "".join(cells):  # int() would take 1_000
        raise BadRow(f"{name} is not a whole number")
    try:
        return whole_numbers(list(map(int, cells)), name)
    except ValueError:
        return whole_numbers([whole_cell(cell, name) for cell in cells], name)


def _stamps(shape: CsvShape, cells: list[str]) -> Integers:
    try:
        if shape.kind == "azure":
            return arrivals_ns(dates_ns(cells))
        return arrivals_ns(seconds_ns(cells))
    except ValueError:
        what = "a date like 2023-11-16 18:15:46.6805900" if shape.kind == "azure" else "a number of seconds"
        raise BadRow(f"{shape.names[0]} is not {what}") from None


# Traces as JSON lines: Mooncake's, LLMServingSim's, our own recordings, measured runs, and lengths alone.

RECORDING = "plimsoll.request/1"
RECORDING_BLOCK = 16
Row = dict[str, object]


class JsonShape(NamedTuple):
    """The fields to read, by their names; "" where the format has none."""

    kind: str
    arrival: str
    prompt: str
    output: str
    ids: str = ""
    stamps: tuple[str, ...] = ()  # Scheduled, first token, finished


SHAPES = (
    JsonShape(
        "recording", "arrival", "prompt_tokens", "output_tokens", "prefix_hashes", ("scheduled", "first_token", "finished")
    ),
    JsonShape("measured", "queued_ts", "input_toks", "output_toks", "", ("scheduled_ts", "first_token_ts", "last_token_ts")),
    JsonShape("llmservingsim", "arrival_time_ns", "input_toks", "output_toks", "input_tok_ids"),
    JsonShape("mooncake", "timestamp", "input_length", "output_length", "hash_ids"),
)
_IN_SECONDS = ("recording", "measured")


def json_shape(first: str, *, lengths_alone: bool = False) -> JsonShape | None:
    """The fields of JSON lines that begin with this one, or None if it has none we know; `lengths_alone` needs no times."""
    row = _rows([first], exact=False)[0]
    if not lengths_alone:
        if "schema" in row:
            return SHAPES[0] if str(row["schema"]).startswith("plimsoll.request/") else None
        for shape in SHAPES[1:]:
            if all(name in row for name in (shape.arrival, shape.prompt, shape.output)):
                return shape
    prompt, output = (next((key for key in row if key.lower() in names), None) for names in (PROMPT_NAMES, OUTPUT_NAMES))
    return JsonShape("lengths", "", prompt, output) if prompt and output else None


def json_columns(shape: JsonShape, lines: list[str], prefix_block: int) -> Columns:
    """The rows as columns, or BadRow; `prefix_block` tokens an id, 0 where a recording has not given it yet."""
    rows = _rows(lines, exact=shape.kind in _IN_SECONDS)
    if shape.kind == "recording" and {row.get("schema") for row in rows} != {RECORDING}:
        raise BadRow(f"schema is not {RECORDING}")
    prompt = whole_numbers(_field(rows, shape.prompt), shape.prompt)
    output = whole_numbers(_field(rows, shape.output), shape.output)
    arrival = _arrivals(shape, rows) if shape.arrival else NOTHING
    found = plain_columns(arrival, prompt, output)
    if shape.kind == "recording":
        said = [row.get("prefix_block", RECORDING_BLOCK) for row in rows if row.get("prefix_hashes")]
        blocks = set(whole_numbers(said, "prefix_block", least=1).tolist()) | ({prefix_block} if prefix_block else set())
        if len(blocks) > 1:
            raise BadRow("prefix_block differs from that of the rows before")
        prefix_block = next(iter(blocks), 0)
        priority = whole_numbers([row.get("priority", 0) for row in rows], "priority", 1 << 31, -(1 << 31))
        found = found._replace(priority=priority)
    named = [(at, str(row["adapter"])) for at, row in enumerate(rows) if row.get("adapter") is not None]
    if named:
        at, names = zip(*named, strict=True)
        found.adapter[list(at)] = ids_as_numbers(list(names), "adapter")
    for place, row in enumerate(rows):
        if row.get("images"):
            found.images[place] = _images(row["images"], int(prompt[place]))
    if shape.stamps:
        found = found._replace(stamps=_json_stamps(shape, rows, arrival))
    if shape.ids:
        ids, counts = _ids(shape, rows, prompt, prefix_block or RECORDING_BLOCK)
        found = found._replace(ids=ids, id_counts=counts)
    return found._replace(prefix_block=prefix_block)


def _images(said: object, prompt: int) -> tuple[int, ...]:
    found = whole_numbers(said, "images", least=1) if isinstance(said, list) else None
    if found is None or found.sum() > prompt:
        raise BadRow("images is not a list of tokens that the prompt has")
    return tuple(found.tolist())


def _rows(lines: list[str], *, exact: bool) -> list[Row]:
    """Parses the lines; `exact` keeps numbers with a point as they are written."""
    read = json.JSONDecoder(parse_float=Decimal if exact else None).raw_decode
    texts = [line.strip() for line in lines]
    try:
        rows, ends = zip(*map(read, texts), strict=True)
    except (ValueError, ArithmeticError, RecursionError):
        raise BadRow("not JSON") from None
    if ends != tuple(map(len, texts)):
        raise BadRow("more than one thing in a line")
    if set(map(type, rows)) - {dict}:
        raise BadRow("not a JSON object")
    return list(rows)


def _field(rows: list[Row], name: str) -> list[object]:
    try:
        return [row[name] for row in rows]
    except KeyError:
        raise BadRow(f"no {name} in it") from None


def _arrivals(shape: JsonShape, rows: list[Row]) -> Integers:
    said = _field(rows, shape.arrival)
    if shape.kind in _IN_SECONDS:
        return arrivals_ns(_seconds(said, shape.arrival))
    if set(map(type, said)) - {int, float}:
        raise BadRow(f"{shape.arrival} is not a number")
    try:
        if shape.kind == "llmservingsim":
            return arrivals_ns([int(one) for one in said if isinstance(one, int | float)])
        return arrivals_ns([round(one * 1_000_000) for one in said if isinstance(one, int | float)])
    except (ValueError, OverflowError):
        raise BadRow(f"{shape.arrival} is out of range") from None


def _seconds(values: list[object], name: str) -> list[int]:
    numbers = [one for one in values if type(one) is int or type(one) is Decimal]
    if len(numbers) != len(values):
        raise BadRow(f"{name} is not a number")
    try:
        return seconds_ns(numbers)
    except ValueError:
        raise BadRow(f"{name} is out of range") from None


def _json_stamps(shape: JsonShape, rows: list[Row], arrival: Integers) -> Integers:
    """(rows, 4): three stamps and the cached tokens; BadRow where the stamps are out of order."""
    found = np.full((len(rows), 4), NO_STAMP, dtype=np.int64)
    latest = arrival
    for at, name in enumerate(shape.stamps):
        there = [i for i, row in enumerate(rows) if row.get(name) is not None]
        found[there, at] = _seconds([rows[i][name] for i in there], name)
        if np.any(found[there, at] < latest[there]):
            raise BadRow(f"{name} lies before what comes first")
        latest = np.maximum(latest, found[:, at])
    there = [i for i, row in enumerate(rows) if row.get("cached_tokens") is not None]
    found[there, 3] = whole_numbers([rows[i]["cached_tokens"] for i in there], "cached_tokens")
    return found


def _ids(shape: JsonShape, rows: list[Row], prompt: Integers, block: int) -> tuple[Integers, Integers]:
    """The ids of all rows in one, without those beyond the prompts, and how many each row has."""
    lists = [[] if (said := row.get(shape.ids)) is None else said for row in rows]
    if set(map(type, lists)) - {list}:
        raise BadRow(f"{shape.ids} is not a list")
    flat = [one for row in lists if isinstance(row, list) for one in row]
    counts = np.array([len(row) for row in lists if isinstance(row, list)], dtype=np.int64)
    needed = blocks_of(np.maximum(prompt, 1), block)
    # vLLM hashes full blocks only, so a recording may end before the prompt does; the rest is then shared with no other.
    short = (counts > 0) & (counts < needed)
    if shape.kind != "recording" and short.any():
        at = int(np.argmax(short))
        hint = "" if shape.kind == "llmservingsim" else f" at --trace-block-size {block}"
        raise BadRow(f"{counts[at]} {shape.ids} cannot cover {prompt[at]} tokens{hint}")
    kept = np.minimum(counts, needed)
    numbers = ids_as_numbers(flat, shape.ids)
    if kept.sum() < len(numbers):
        numbers = numbers[places(np.cumsum(counts) - counts, kept)]
    return numbers, kept


_SERIES = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")


class _Format(NamedTuple):
    prefix_block: int  # 0: the rows give it
    parse: Callable[[list[str], int], Columns]  # Takes lines, and the tokens an id covers as far as known


class _Rows(NamedTuple):
    prefix_block: int
    columns: Columns
    bad: int


def read_trace(
    path: str,
    *,
    limit: int | None = None,
    prefix_block: int = 512,
    arrivals: Arrivals | None = None,
    skip_bad: bool = False,
) -> Trace:
    """The requests of a file ("-": standard input), sorted by arrival, then cut to `limit`, the first at 0.

    `arrivals` gives the times of requests, in place of the file's own if it has any.
    One line of BadInput names the first row that cannot be read; with `skip_bad` such rows are counted instead.
    """
    return _trace(path, _read(path, prefix_block, skip_bad=skip_bad), limit, arrivals)[0]


def read_lengths(path: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every request in a file that `simulate` takes, in its order, for `plan --workload`."""
    columns = _read(path, RECORDING_BLOCK, lengths_alone=True).columns
    prompt, output = np.maximum(columns.prompt, 1), np.maximum(columns.output, 1)
    return list(zip(prompt.tolist(), output.tolist(), strict=True))


def read_measured(path: str, *, timeseries: str | None = None, skip_bad: bool = False) -> MeasuredRun:
    """A run with its stamps: a recording that has them, or the per-request file of a measured run."""
    try:
        rows = _read(path, RECORDING_BLOCK, skip_bad=skip_bad)
    except BadInput as error:
        wanted = "a measured run: requests with stamps are wanted (docs/step-time.md)"
        raise type(error)(str(error).replace(UNKNOWN, wanted)) from None
    if not (len(rows.columns.stamps) and (rows.columns.stamps[:, :3] != NO_STAMP).any()):
        raise BadInput(f"{path}: no request says when it was scheduled, answered or done: not a measured run")
    trace, order, zero = _trace(path, rows, None, None)
    found = rows.columns.stamps[order]
    is_there = found != NO_STAMP
    found[:, :3] -= np.where(is_there[:, :3], zero, 0)
    scheduled, first_token, finish, cached = np.where(is_there, found, ABSENT).T.copy()
    return MeasuredRun(trace, scheduled, first_token, finish, cached, read_timeseries(timeseries) if timeseries else None)


def read_timeseries(path: str) -> RunSeries:
    """The CSV with columns t, prompt_throughput, gen_throughput, running, waiting, kv_cache_pct."""
    try:
        lines = [line.decode("utf-8-sig") for chunk in read_lines(path) for line in chunk.lines]
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not text") from None
    table = csv.DictReader(lines, skipinitialspace=True)
    try:
        if not set(_SERIES) <= set(table.fieldnames or ()):
            raise BadInput(f"{path}: the columns of a time series are {','.join(_SERIES)}")
        rows = np.array([[float(row[name]) for name in _SERIES] for row in table], dtype=np.float64)
    except (ValueError, TypeError, csv.Error):
        raise BadInput(f"{path}, row {table.line_num}: not {len(_SERIES)} numbers") from None
    if not rows.size or not ((rows >= 0) & (rows <= 1e12)).all():
        raise BadInput(f"{path}: no row in it, or a number that is out of range")
    at, prompt, output, running, waiting, percent = rows.T.copy()
    return RunSeries(at, prompt, output, running.astype(np.int64), waiting.astype(np.int64), percent / 100)


def _read(path: str, prefix_block: int, *, skip_bad: bool = False, lengths_alone: bool = False) -> _Rows:
    if not 1 <= prefix_block <= 1 << 30:
        raise BadInput("--trace-block-size must be 1 or more tokens")
    parts: list[Columns] = []
    found: _Format | None = None
    bad = ids = 0
    for read in read_lines(path):
        chunk = read
        if found is None and chunk.lines:
            found, chunk = _format(path, chunk, prefix_block, lengths_alone=lengths_alone)
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
    return _Rows(columns.prefix_block or found.prefix_block or RECORDING_BLOCK, columns, bad + columns.failed)


def _format(path: str, chunk: Lines, prefix_block: int, *, lengths_alone: bool) -> tuple[_Format, Lines]:
    """Returns the file's format by its first line, and the lines left to read."""
    where = f"{path}, line {chunk.numbers[0]}"
    try:
        first = _decoded(chunk.lines[:1])[0].removeprefix("\ufeff")
        if first.lstrip().startswith("{"):
            chunk = chunk._replace(lines=[first.encode("utf-8"), *chunk.lines[1:]])
            if (as_json := json_shape(first, lengths_alone=lengths_alone)) is not None:
                block = {"llmservingsim": 1, "recording": 0}.get(as_json.kind, prefix_block)
                return _Format(block, lambda lines, known: json_columns(as_json, lines, known)), chunk
        else:
            if (as_csv := csv_shape(first, lengths_alone=lengths_alone)) is not None:
                rest = Lines(chunk.numbers[1:], chunk.lines[1:])
                return _Format(prefix_block, lambda lines, _: csv_columns(as_csv, lines)), rest
    except (BadRow, UnicodeError) as error:
        raise BadInput(f"{where}: {error if isinstance(error, BadRow) else 'not text'}") from None
    raise BadInput(f"{where}: not {UNKNOWN}")


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
    """The trace, the file's rows in its order, and the moment of its zero."""
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
    name = "standard input" if path == "-" else PurePath(path).name
    arrival = columns.arrival if len(columns.arrival) else np.zeros(count, dtype=np.int64)
    whole = Trace(
        name, arrival, prompt, output, columns.priority, columns.adapter, columns.images, columns.ids,
        starts(columns.id_counts), rows.prefix_block, rows.bad,
    )  # fmt: skip
    return pick(whole, order)._replace(arrival_ns=times - zero), order, zero
