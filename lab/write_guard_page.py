"""Writes the table of numbers in docs/guard.md from the policy: `python -m lab.write_guard_page`."""

from __future__ import annotations

from pathlib import Path

from plimsoll.domain.units import GIB, MIB
from plimsoll.guard.grades import Grade
from plimsoll.guard.policy import GRADES, KNOBS, Knob

PAGE = Path(__file__).parents[1] / "docs" / "guard.md"
BEGIN, END = "<!-- numbers: made by `python -m lab.write_guard_page` -->", "<!-- end of numbers -->"


def numbers() -> str:
    """Every number that a policy can set."""
    rows = ["| condition | number | default | may be | |", "|---|---|---|---|---|"]
    for knob in KNOBS:
        grade = GRADES.get(knob.kind, Grade.ADVICE)
        name = f"`{knob.kind}` ({grade})" if knob.name == "for" else ""
        bounds = f"{_shown(knob, knob.low)} to {_shown(knob, knob.high)}"
        rows.append(f"| {name} | `{knob.name}` | {_shown(knob, knob.default)} | {bounds} | {knob.says} |")
    return "\n".join(rows)


def _shown(knob: Knob, value: float) -> str:
    if knob.unit == "s":
        for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m")):
            if value >= size and value % size == 0:
                return f"{value / size:g}{unit}"
        return f"{value:g}s"
    if knob.unit == "bytes":
        return f"{value / GIB:g}GiB" if value >= GIB and value % GIB == 0 else f"{value / MIB:.0f}MiB"
    return f"{100 * value:g}%" if knob.unit == "share" else f"{value:,.0f}"


def page(text: str) -> str:
    """The page with its table made anew; the rest is as it was."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE.name} has no place for the numbers: {BEGIN}")
    return f"{head}{BEGIN}\n{numbers()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")
