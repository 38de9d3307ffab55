"""What vLLM's own parser says to a command that it does not take; it then ends with exit code 2."""

from __future__ import annotations

from plimsoll.engine.command_line import Argument, CommandLine, Unseen
from plimsoll.engine.flags import FlagRow
from plimsoll.engine.values import row_problem

_KINDS = {"int": "int", "float": "float", "human-int": "human_readable_int", "human-int-or-auto": "human_readable_int_or_auto"}


def complaint_of(line: CommandLine, unseen: Unseen, *, knows_all: bool = True) -> str | None:
    """The last line that it prints; None if it takes the command.

    `knows_all`: what our table of the release does not have is refused, too.
    """
    for argument in line.arguments:
        if argument.candidates:
            return f"vllm serve: error: ambiguous option: {argument.typed} could match {', '.join(argument.candidates)}"
    for argument in line.arguments:
        problem = _problem(argument, unseen)
        if problem is not None:
            return f"vllm serve: error: {problem}"
    strange = [word for argument in line.arguments if argument.row is None for word in _words(argument)]
    strange += [word for argument in line.arguments if _is_loose(argument) for word in argument.values]
    strange += line.leftovers
    return f"vllm: error: unrecognized arguments: {' '.join(strange)}" if strange and knows_all else None


def _is_loose(argument: Argument) -> bool:
    """Whether what stands behind a switch is a word of its own to the parser: `--enforce-eager true`."""
    return argument.row is not None and not argument.row.takes_value and not argument.has_equals


def _words(argument: Argument) -> list[str]:
    if argument.is_opaque:
        return []
    return [f"{argument.typed}={argument.values[0]}"] if argument.has_equals else [argument.typed, *argument.values]


def _problem(argument: Argument, unseen: Unseen) -> str | None:
    row = argument.row
    if row is None or argument.path:
        return None
    name = "/".join(row.spellings)
    if argument.lacks_value:
        return f"argument {name}: expected {'at least one argument' if row.nargs == '+' else 'one argument'}"
    if not row.takes_value:
        said = argument.values[0] if argument.values and not _is_loose(argument) else None
        return f"argument {name}: ignored explicit argument {said!r}" if said is not None else None
    for value in argument.values:
        if value not in unseen and row_problem(row, value) is not None:
            return f"argument {name}: {_refusal(row, value)}"
    return None


def _refusal(row: FlagRow, value: str) -> str:
    if row.choices is not None and value not in row.choices:
        return f"invalid choice: {value!r} (choose from {', '.join(repr(choice) for choice in row.choices)})"
    return f"invalid {_KINDS.get(row.kind, row.kind)} value: {value!r}"
