"""Whether the parser takes a flag's value, as far as a table can tell."""

from __future__ import annotations

from plimsoll.domain.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.engine.command_line import Argument
from plimsoll.errors import BadInput

# What vLLM's optional types read as "not set".
_NOTHING = ("", "None")


def value_problem(argument: Argument) -> str | None:
    """Why the parser refuses the value; None if it takes it or we cannot tell."""
    row = argument.row
    assert row is not None
    if argument.lacks_value:
        return "it needs a value"
    if not row.takes_value:
        return f"it takes no value, not {argument.values[0]!r}" if argument.values else None
    for value in argument.values:
        if "$" in value:
            continue  # a variable we could not see
        if row.choices is not None and value not in row.choices and not _is_same_choice(value, row.choices):
            return f"{value!r} is none of {', '.join(row.choices)}"
        problem = _wrong_kind(row.kind, value)
        if problem is not None:
            return problem
    return None


def _is_same_choice(value: str, choices: tuple[str, ...]) -> bool:
    """Choices of a number may be spelled another way: `016` is 16."""
    try:
        return str(int(value)) in choices
    except ValueError:
        return value in _NOTHING and "None" in choices


def _wrong_kind(kind: str, value: str) -> str | None:
    if value in _NOTHING:
        return None
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
    except ValueError:
        return f"{value!r} is not a {'whole number' if kind == 'int' else 'number'}"
    except BadInput as error:
        return str(error)
    return None
