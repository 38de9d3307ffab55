"""Several plans side by side: what `plimsoll plan --compare FILE` found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from plimsoll.domain.redaction import redact_words
from plimsoll.domain.units import GIB, format_count, format_gib
from plimsoll.report.flags import clean, rewritten_line
from plimsoll.report.plan import Planned, gpus_of, verdict
from plimsoll.report.plan import as_json as plan_json
from plimsoll.report.wrapping import WIDTH, wrapped

_MARK, _NAMES, _COLUMN = 2, 24, 21
_SAME, _DIFFERENT = "  ", "* "


class Compared(NamedTuple):
    """One line of the file: its plan, or why there is none."""

    source: str  # "FILE:3"
    planned: Planned | None
    problem: str = ""


Value = int | float | str | None


class _Row(NamedTuple):
    name: str
    values: tuple[Value, ...]  # None: there is no plan, or no such figure
    show: Callable[[Value, Value], str]  # the value of one plan, and that of the first

    def differs(self, columns: Sequence[int] | None = None) -> bool:
        chosen = self.values if columns is None else [self.values[column] for column in columns]
        return len({value for value in chosen if value is not None}) > 1


def as_text(compared: Sequence[Compared], notes: Sequence[str] = ()) -> str:
    """The legend of the columns, the table with a mark at every row that differs, the problems, and what was left out."""
    lines = []
    for number, one in enumerate(compared):
        line = rewritten_line(one.planned.checked) if one.planned is not None else f"not planned: {clean(one.problem)}"
        lines += wrapped(f"{letter(number):>3}  {clean(one.source)}: {line}", " " * 5)
    rows, own = _rows(compared), _own_flags(compared)
    per_page = max(2, (WIDTH - _MARK - _NAMES) // _COLUMN)
    for columns in _pages(len(compared), per_page):
        lines += ["", " " * (_MARK + _NAMES) + "".join(f"{letter(column):<{_COLUMN}}" for column in columns).rstrip()]
        lines += _headings([own[column] for column in columns])
        for row in rows:
            cells = "".join(f"{_cut(row.show(row.values[column], row.values[0])):<{_COLUMN}}" for column in columns)
            lines.append(f"{_DIFFERENT if row.differs(columns) else _SAME}{row.name:<{_NAMES}}{cells}".rstrip())
    same = "" if any(row.differs() for row in rows) else "; nothing differs"
    lines += ["", f"{_DIFFERENT}differs between the plans; in brackets: GiB more or less than {letter(0)}{same}"]
    for number, one in enumerate(compared):
        for finding in one.planned.findings if one.planned is not None else ():
            lines += wrapped(f"{letter(number):>3}  {finding.code.value}: {clean(finding.title)}", " " * 5)
    for note in notes:
        lines += wrapped(f"  note: {clean(note)}", " " * 8)
    return "\n".join(lines)


def as_json(compared: Sequence[Compared], notes: Sequence[str] = ()) -> str:
    """One object: `compare` has a whole plan a line, `differences` the rows that differ."""
    import json

    body = {
        "schema": "plimsoll.plan/1",
        "fits": all(one.planned is not None and one.planned.fits for one in compared),
        "compare": [
            {
                "source": clean(one.source),
                "command": None if one.planned is None else rewritten_line(one.planned.checked),
                "problem": clean(one.problem) or None,
                "plan": None if one.planned is None else json.loads(plan_json(one.planned)),
            }
            for one in compared
        ],
        "differences": [{"what": row.name.strip(), "values": list(row.values)} for row in _rows(compared) if row.differs()],
        "notes": [clean(note) for note in notes],
    }
    return json.dumps(body, indent=2, ensure_ascii=False)


def letter(number: int) -> str:
    """A, B, ... Z, then A2, B2, ..."""
    rounds, index = divmod(number, 26)
    return chr(ord("A") + index) + (str(rounds + 1) if rounds else "")


def _own_flags(compared: Sequence[Compared]) -> list[list[str]]:
    """For each plan the flags as they were written that not all of the commands have."""
    written = [_flags(one.planned) for one in compared]
    planned = [flags for one, flags in zip(compared, written, strict=True) if one.planned is not None]
    return [[flag for flag in flags if not all(flag in others for others in planned)] for flags in written]


def _flags(planned: Planned | None) -> list[str]:
    """A start's flags, each with its values; secrets are hidden."""
    found: list[str] = []
    for word in redact_words(list(planned.checked.launch.arguments)) if planned is not None else ():
        if word.startswith("-"):
            found.append(clean(word))
        elif found:  # what stands before the first flag is the model, which has a row of its own
            found[-1] += f" {clean(word)}"
    return found


def _headings(own: Sequence[Sequence[str]]) -> list[str]:
    """Lines under the letters with what each start has of its own; a value that would be cut has a line of its own."""
    columns = []
    for flags in own:
        cells: list[str] = []
        for flag in flags:
            name, _, value = flag.partition(" ")
            cells += [flag] if len(flag) < _COLUMN else [_cut(name), *([f"  {value}"] if value else [])]
        columns.append(cells)
    depth = max((len(cells) for cells in columns), default=0)
    lines = []
    for row in range(depth):
        cells = [_cut(cells[row]) if row < len(cells) else "" for cells in columns]
        lines.append((" " * (_MARK + _NAMES) + "".join(f"{cell:<{_COLUMN}}" for cell in cells)).rstrip())
    return lines


def _pages(count: int, per_page: int) -> list[list[int]]:
    """The columns of each table; the first plan stays beside all others."""
    pages = [list(range(min(count, per_page)))]
    others = range(per_page, count, per_page - 1)
    return pages + [[0, *range(start, min(count, start + per_page - 1))] for start in others]


def _rows(compared: Sequence[Compared]) -> list[_Row]:
    return [
        _Row(name, tuple(None if one.planned is None else read(one.planned) for one in compared), show)
        for name, read, show in _READERS
    ]


def _cut(text: str) -> str:
    """A cell that keeps its column; what is cut is in the legend, or in the list below."""
    return text if len(text) < _COLUMN else text[: _COLUMN - 4] + "..."


def _plain(value: Value, _: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return format_count(value) if isinstance(value, int) else value


def _bytes(value: Value, first: Value) -> str:
    if not isinstance(value, int):
        return "-"
    apart = value - first if isinstance(first, int) else 0
    return format_gib(value) + (f" ({apart / GIB:+.2f})" if apart else "")


def _verdict(planned: Planned) -> str:
    """As a plan alone says it; only what would not go into a column is said shorter."""
    return "fits, may not start" if planned.fits and not planned.ledger.fits_at_low_end else verdict(planned)


def _findings(planned: Planned) -> str:
    codes = [finding.code.value for finding in planned.findings]
    return f"{len(codes)}: {', '.join(codes)}" if codes else "none"


_READERS: tuple[tuple[str, Callable[[Planned], Value], Callable[[Value, Value], str]], ...] = (
    ("verdict", _verdict, _plain),
    ("model", lambda p: clean(p.model), _plain),
    ("GPU", lambda p: gpus_of(p.ledger), _plain),
    ("vLLM", lambda p: clean(p.ledger.settings.release), _plain),
    ("utilization", lambda p: f"{p.ledger.settings.utilization:g}", _plain),
    ("max-model-len", lambda p: p.ledger.kv_plan.max_model_len, _plain),
    ("max-num-seqs", lambda p: p.ledger.settings.max_num_seqs, _plain),
    ("max-num-batched-tokens", lambda p: p.ledger.settings.max_num_batched_tokens, _plain),
    ("tensor parallel", lambda p: p.ledger.settings.tensor_parallel, _plain),
    ("pipeline parallel", lambda p: p.ledger.settings.pipeline_parallel, _plain),
    ("data parallel", lambda p: p.ledger.settings.data_parallel, _plain),
    ("kv-cache-dtype", lambda p: clean(p.ledger.settings.kv_cache_dtype), _plain),
    ("eager", lambda p: "yes" if p.ledger.settings.enforce_eager else "no", _plain),
    ("requested", lambda p: p.ledger.requested.value, _bytes),
    ("  weights", lambda p: p.ledger.weights.value, _bytes),
    ("  non-torch", lambda p: p.ledger.non_torch.value, _bytes),
    ("  activation", lambda p: p.ledger.activation.value, _bytes),
    ("  graphs", lambda p: p.ledger.graphs.value, _bytes),
    ("  KV cache", lambda p: p.ledger.kv.value, _bytes),
    ("slack", lambda p: p.ledger.slack.value, _bytes),
    ("block size", lambda p: p.ledger.kv_plan.block_size, _plain),
    ("bytes per block", lambda p: p.ledger.kv_plan.bytes_per_block, _plain),
    ("KV blocks", lambda p: p.ledger.kv_plan.num_blocks, _plain),
    ("KV tokens", lambda p: p.ledger.kv_plan.tokens, _plain),
    ("max concurrency", lambda p: p.ledger.kv_plan.max_concurrency, _plain),
    ("findings", _findings, _plain),
)
