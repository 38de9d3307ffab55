"""The tables of words (`data/*.yaml`): what a finding, a cause, an exit, an event or a kernel line means to people.

A table is read when it is first asked for: most logs need one or none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity


@functools.cache
def words(name: str, folder: str = "doctor/data") -> Any:
    """One table as it stands in its file."""
    with (Path(__file__).parents[1] / folder / f"{name}.yaml").open("rb") as file:
        return yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  either is safe


def fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the fields of a rule: codes, severities and remedies are made what they are in the code."""
    made: dict[str, Any] = {"code": Code, "severity": Severity, "remedy": remedies, "not_a_remedy": tuple}
    return {name: made.get(name, lambda value: value)(value) for name, value in row.items()}


def remedies(rows: Iterable[Mapping[str, str]]) -> tuple[Remedy, ...]:
    """The remedies of a row."""
    return tuple(Remedy(**row) for row in rows)


def finding(
    row: str | Mapping[str, Any], evidence: Iterable[Evidence], because: str = "", /, *, first: Sequence[Remedy] = (),
    severity: Severity | None = None, confidence: float | None = None, not_a_remedy: tuple[str, ...] = (), **figures: object,
) -> Finding:  # fmt: skip
    """The finding of a row, or of the row of this name in data/findings.yaml, with the figures in its words.

    `first` are remedies before its own; `not_a_remedy` stands where the row names none.
    """
    row = words("findings")[row] if isinstance(row, str) else row

    def told(text: str) -> str:
        return text.format_map(figures) if figures else text

    remedy = [Remedy(**{field: told(text) for field, text in one.items()}) for one in row.get("remedy", ())]
    return Finding(
        Code(row["code"]), severity or Severity(row.get("severity", Severity.CRITICAL)),
        row["confidence"] if confidence is None else confidence, told(row["title"]), because or told(row["because"]),
        tuple(evidence), (*first, *remedy), tuple(row.get("not_a_remedy", not_a_remedy)),
    )  # fmt: skip
