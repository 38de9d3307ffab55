"""Whether the parser takes a flag's value, as far as a table can tell."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from plimsoll.domain.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.engine.command_line import Argument, Unseen
from plimsoll.engine.flags import FlagRow, is_before
from plimsoll.errors import BadInput

# What vLLM's optional types read as "not set".
_NOTHING = ("", "None")
# Numbers such as 80m may stand bare in JSON: vLLM expands them before it reads it.
_HUMAN_NUMBER = r"\b\d+(?:\.\d+)?[kKmMgGtT]\b"


class _Range(NamedTuple):
    """Numbers outside of which vLLM does not start, though its parser takes them."""

    least: float
    most: float = math.inf
    above: bool = False  # the least itself is refused
    below: bool = False  # the most itself is refused
    since: str | None = None  # the release whose source was read; None: it holds in every release
    unless: frozenset[str] = frozenset()  # beside these nobody looks at the number

    def problem(self, value: str) -> str | None:
        """Why the number is refused; None if it is not, or is no number."""
        try:
            number = float(value)
        except ValueError:
            return None
        low = number > self.least if self.above else number >= self.least
        high = number < self.most if self.below else number <= self.most
        if low and high:
            return None
        ends = [f"{'above' if self.above else 'at least'} {self.least:g}"]
        ends += [f"{'below' if self.below else 'at most'} {self.most:g}"] if self.most < math.inf else []
        return f"{value!r} is not {' and '.join(ends)}"


# The limits in vLLM's configuration classes of 0.32.0; earlier releases had some of them and were not read for it.
_FROM_ONE = _Range(1, since="0.32.0")
RANGES = {
    "--gpu-memory-utilization": _Range(0, 1, above=True),
    # No socket has another number. With these the server listens elsewhere or not at all.
    "--port": _Range(0, 65535, unless=frozenset({"--uds", "--headless", "--grpc"})),
    "--tensor-parallel-size": _FROM_ONE,
    "--pipeline-parallel-size": _FROM_ONE,
    "--decode-context-parallel-size": _FROM_ONE,
    "--max-num-seqs": _FROM_ONE,
    "--max-num-batched-tokens": _FROM_ONE,
    "--block-size": _FROM_ONE,
    "--stream-interval": _FROM_ONE,
    "--cpu-offload-gb": _Range(0, since="0.32.0"),
    "--watermark": _Range(0, 1, below=True, since="0.32.0"),
}


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


def config_problem(argument: Argument, unseen: Unseen, release: str, given: frozenset[str]) -> str | None:
    """Why vLLM does not start with values that its parser takes; None if it does, or we cannot tell."""
    assert argument.row is not None
    name = argument.row.name
    seen = (value for value in argument.values if value not in unseen)
    problem = next(filter(None, (out_of_range(name, value, release, given) for value in seen)), None)
    if problem is None:
        return None
    return f"{'no release takes' if RANGES[name].since is None else f'{release} does not start with'} this value: {problem}"


def out_of_range(name: str, value: str, release: str, given: frozenset[str]) -> str | None:
    """Why vLLM refuses a number that its parser takes; None if it does not, or is no number."""
    limits = RANGES.get(name)
    if limits is None or limits.unless & given or (limits.since is not None and is_before(release, limits.since)):
        return None
    return limits.problem(value)


def in_form_of(row: FlagRow, values: tuple[str, ...]) -> str | None:
    """A value as this flag takes it, where other releases take it in another form: 32k as 32000, image=4 as JSON."""
    if len(values) != 1:
        return None
    if row.kind == "json":
        import json

        pairs = key_values(values[0])
        return json.dumps(pairs) if pairs is not None else None
    try:
        return str(parse_vllm_integer(values[0])) if row.kind == "int" else None
    except BadInput:
        return None


def key_values(value: str) -> dict[str, int] | None:
    """`image=4,video=1`, as --limit-mm-per-prompt took it before it took JSON; None if it is not that."""
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,18})\s*", item) for item in value.split(",")]
    return {pair[1].lower(): int(pair[2]) for pair in pairs if pair is not None} if all(pairs) else None


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
