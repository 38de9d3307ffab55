"""Whether the parser takes a flag's value, as far as a table can tell."""

from __future__ import annotations

import re

from plimsoll.domain.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.engine.command_line import Argument, Unseen
from plimsoll.engine.flags import FlagRow
from plimsoll.errors import BadInput

# What vLLM's optional types read as "not set".
_NOTHING = ("", "None")
# Numbers that the parser takes and vLLM's configuration then refuses, in every release: above the first, at most the second.
_RANGES = {"--gpu-memory-utilization": (0.0, 1.0)}
# Numbers such as 80m may stand bare in JSON: vLLM expands them before it reads it.
_HUMAN_NUMBER = r"\b\d+(?:\.\d+)?[kKmMgGtT]\b"


def value_problem(argument: Argument, unseen: Unseen) -> str | None:
    """Why the parser refuses the value; None if it takes it or we cannot tell."""
    row = argument.row
    assert row is not None
    if argument.lacks_value:
        return "it needs a value"
    if not row.takes_value:
        return f"it takes no value, not {argument.values[0]!r}" if argument.values else None
    for value in argument.values:
        problem = None if value in unseen else row_problem(row, value)
        if problem is not None:
            return problem
    return None


def row_problem(row: FlagRow, value: str) -> str | None:
    """Why this flag does not take that one value."""
    if row.choices is not None and value not in row.choices and not _is_same_choice(value, row):
        return f"{value!r} is none of {', '.join(row.choices)}"
    if value in _NOTHING and row.is_optional:
        return None
    return _wrong_kind(row.kind, value)


def out_of_range(name: str, value: str) -> str | None:
    """Why vLLM's configuration refuses a number that its parser takes; None if it does not, or is no number."""
    if name not in _RANGES:
        return None
    above, most = _RANGES[name]
    try:
        return None if above < float(value) <= most else f"{value!r} is not above {above:g} and at most {most:g}"
    except ValueError:
        return None


def _is_same_choice(value: str, row: FlagRow) -> bool:
    """Choices of a number may be spelled another way: `016` is 16."""
    try:
        return str(int(value)) in (row.choices or ())
    except ValueError:
        return value in _NOTHING and (row.is_optional or "None" in (row.choices or ()))


def _wrong_kind(kind: str, value: str) -> str | None:
    try:
        match kind:
            case "int":
                int(value)
            case "float":
                float(value)
            case "human-int":
                parse_vllm_integer(value)
            case "human-int-or-auto":
                parse_vllm_integer_or_auto(value)
            case "json":
                return _wrong_json(value)
    except ValueError:
        return f"{value!r} is not a {'whole number' if kind == 'int' else 'number'}"
    except BadInput as error:
        return str(error)
    return None


def _wrong_json(value: str) -> str | None:
    import json

    for text in (value, re.sub(_HUMAN_NUMBER, "0", value)):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        return None
    return f"{value[:60]!r} is not JSON"
