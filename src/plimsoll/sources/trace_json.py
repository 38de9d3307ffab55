"""Traces as JSON lines: Mooncake's, LLMServingSim's, our own recordings, measured runs, and lengths alone."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Integers
from plimsoll.domain.trace_rows import blocks_of, places
from plimsoll.sources.trace_columns import (
    NO_STAMP,
    NO_STAMPS,
    NOTHING,
    Columns,
    arrivals_ns,
    ids_as_numbers,
    whole_numbers,
)
from plimsoll.sources.trace_shapes import OUTPUT_NAMES, PROMPT_NAMES, BadRow
from plimsoll.sources.trace_stamps import seconds_ns

RECORDING = "plimsoll.request/1"
RECORDING_BLOCK = 16
Row = dict[str, object]


class JsonShape(NamedTuple):
    """Which fields matter, by their names; "" where the format has none."""

    kind: str
    arrival: str
    prompt: str
    output: str
    ids: str = ""
    stamps: tuple[str, ...] = ()
    """Scheduled, first token, finished."""


SHAPES = (
    JsonShape(
        "recording", "arrival", "prompt_tokens", "output_tokens", "prefix_hashes", ("scheduled", "first_token", "finished")
    ),
    JsonShape("measured", "queued_ts", "input_toks", "output_toks", "", ("scheduled_ts", "first_token_ts", "last_token_ts")),
    JsonShape("llmservingsim", "arrival_time_ns", "input_toks", "output_toks", "input_tok_ids"),
    JsonShape("mooncake", "timestamp", "input_length", "output_length", "hash_ids"),
)
_IN_SECONDS = ("recording", "measured")


def json_shape(first: str, kind: str | None) -> JsonShape | None:
    """How to read JSON lines that begin with this one, or None if it has no fields we know."""
    row = _rows([first], exact=False)[0]
    if kind is not None and kind != "lengths":
        return next((shape for shape in SHAPES if shape.kind == kind), None)
    if kind is None:
        if "schema" in row:
            return SHAPES[0] if str(row["schema"]).startswith("plimsoll.request/") else None
        for shape in SHAPES[1:]:
            if all(name in row for name in (shape.arrival, shape.prompt, shape.output)):
                return shape
    prompt, output = (next((key for key in row if key.lower() in names), None) for names in (PROMPT_NAMES, OUTPUT_NAMES))
    return JsonShape("lengths", "", prompt, output) if prompt and output else None


def json_columns(shape: JsonShape, lines: list[str], prefix_block: int) -> Columns:
    """The rows as columns, or BadRow; `prefix_block` tokens an id, 0 where a recording has not said it yet."""
    rows = _rows(lines, exact=shape.kind in _IN_SECONDS)
    if shape.kind == "recording" and {row.get("schema") for row in rows} != {RECORDING}:
        raise BadRow(f"schema is not {RECORDING}")
    prompt = whole_numbers(_field(rows, shape.prompt), shape.prompt)
    output = whole_numbers(_field(rows, shape.output), shape.output)
    arrival = _arrivals(shape, rows) if shape.arrival else NOTHING
    priority = np.zeros(len(rows), dtype=np.int64)
    stamps = NO_STAMPS
    if shape.kind == "recording":
        prefix_block = _block_of(rows, prefix_block)
        priority = whole_numbers([row.get("priority", 0) for row in rows], "priority", 1 << 31, -(1 << 31))
    if shape.stamps:
        stamps = _stamps(shape, rows, arrival)
    ids, counts = NOTHING, np.zeros(len(rows), dtype=np.int64)
    if shape.ids:
        ids, counts = _ids(shape, rows, prompt, prefix_block or RECORDING_BLOCK)
    return Columns(arrival, prompt, output, priority, ids, counts, stamps, prefix_block)


def _rows(lines: list[str], *, exact: bool) -> list[Row]:
    """`exact` keeps numbers with a point as they are written."""
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


def _stamps(shape: JsonShape, rows: list[Row], arrival: Integers) -> Integers:
    """(rows, 4): three stamps and the cached tokens; BadRow where a later thing happened before an earlier one."""
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


def _block_of(rows: list[Row], known: int) -> int:
    """Tokens for each hash, on which all rows that have any must agree."""
    said = [row.get("prefix_block", RECORDING_BLOCK) for row in rows if row.get("prefix_hashes")]
    if not said:
        return known
    blocks = set(whole_numbers(said, "prefix_block", least=1).tolist())
    if len(blocks | ({known} if known else set())) > 1:
        raise BadRow("prefix_block differs from that of the rows before")
    return int(blocks.pop())


def _ids(shape: JsonShape, rows: list[Row], prompt: Integers, block: int) -> tuple[Integers, Integers]:
    """The ids of all rows in one, without those beyond the prompts, and how many each row has."""
    lists = [[] if (said := row.get(shape.ids)) is None else said for row in rows]
    if set(map(type, lists)) - {list}:
        raise BadRow(f"{shape.ids} is not a list")
    flat = [one for row in lists if isinstance(row, list) for one in row]
    counts = np.array([len(row) for row in lists if isinstance(row, list)], dtype=np.int64)
    needed = blocks_of(np.maximum(prompt, 1), block)
    # vLLM hashes full blocks only, so a recording may end before the prompt does; the rest then is unlike any other.
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
