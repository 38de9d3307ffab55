"""Reads how long the requests of a trace are: Azure's CSV, Mooncake's JSON lines, or any file with such columns.

Apart from `traces`, which reads all of a trace and needs numpy: `plan` works without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.trace_lines import read_lines

ROWS_MAX = 5_000_000
_PROMPT = ("ContextTokens", "input_length", "prompt_tokens", "num_prefill_tokens")
_OUTPUT = ("GeneratedTokens", "output_length", "completion_tokens", "num_decode_tokens")


def read_lengths(path: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every request, in the file's order; one line says what is wrong with it."""
    found = list(_rows(path))
    if not found:
        raise BadInput(f"{path}: no request in it")
    return found


def _rows(path: str) -> Iterator[tuple[int, int]]:
    header: list[str] | None = None
    for chunk in read_lines(path):
        for number, line in zip(chunk.numbers, chunk.lines, strict=True):
            where = f"{path}, line {number}"
            if number > ROWS_MAX:
                raise TooLarge(f"{where}: longer than a trace can be")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                raise BadInput(f"{where}: not text") from None
            if text.lstrip().startswith("{"):
                yield _pair(_json(text, where), where)
            elif header is None:
                header = [cell.strip() for cell in text.split(",")]
            else:
                yield _pair(dict(zip(header, text.split(","), strict=False)), where)


def _json(text: str, where: str) -> dict[str, object]:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: not JSON") from None
    return loaded if isinstance(loaded, dict) else {}


def _pair(row: dict[str, object] | dict[str, str], where: str) -> tuple[int, int]:
    values = []
    for names in (_PROMPT, _OUTPUT):
        said = next((row[name] for name in names if name in row), None)
        try:
            number = int(float(str(said)))
        except (ValueError, OverflowError):
            raise BadInput(f"{where}: no {names[0]} (or {', '.join(names[1:])}) in it") from None
        if number < 0:
            raise BadInput(f"{where}: {number} tokens")
        values.append(number)
    return max(1, values[0]), max(1, values[1])
