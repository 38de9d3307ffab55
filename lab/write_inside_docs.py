"""Writes the table of releases in docs/support.md: `python -m lab.write_inside_docs`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from plimsoll.vllm import versions
from plimsoll.vllm.extension_points import BY_SIGNATURE, NEEDS, TESTED, InsidePart, PartVerdict, answers_in, verdicts
from plimsoll.vllm.versions import Behaviour

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN = "<!-- made by `python -m lab.write_inside_docs` from src/plimsoll/vllm/data/inside.json; do not edit -->"
END = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Releases next to each other with the same verdicts and the same evidence."""

    first: str
    last: str
    verdicts: tuple[PartVerdict, ...]
    evidence: str


def stretches() -> list[Stretch]:
    """Returns the stretches from the oldest supported release to the newest."""
    made: list[Stretch] = []
    for release in versions.wheels():
        if not Behaviour.WORKER_EXTENSIONS.is_in(release):  # nothing is claimed for older ones
            continue
        found = verdicts(answers_in(release), NEEDS)
        evidence = TESTED.get(release, BY_SIGNATURE)
        if made and (made[-1].verdicts, made[-1].evidence) == (found, evidence):
            made[-1] = replace(made[-1], last=release)
        else:
            made.append(Stretch(release, release, found, evidence))
    return made


def block() -> str:
    """The table, newest releases first, with a number for each thing that is lost."""
    lost: list[str] = []
    rows = []
    for stretch in reversed(stretches()):
        named = stretch.first if stretch.first == stretch.last else f"{stretch.first} to {stretch.last}"
        cells = [_cell(verdict, lost) for verdict in stretch.verdicts]
        rows.append(f"| {' | '.join([named, *cells, stretch.evidence])} |")
    lines = [
        BEGIN,
        "",
        f"| vLLM | {' | '.join(part.value for part in InsidePart)} | how it is known |",
        "|---" * (len(InsidePart) + 2) + "|",
        *rows,
        "",
        *(f"{number}. {what}" for number, what in enumerate(lost, start=1)),
        "",
        f"{len(NEEDS)} things are looked for in each release, by file, class, arguments and attributes; they stand with their",
        "purpose in `src/plimsoll/vllm/data/extension_needs.yaml`.",
        END,
    ]
    return "\n".join(lines)


def _cell(verdict: PartVerdict, lost: list[str]) -> str:
    what = (*verdict.because, *verdict.details)
    lost += [w for w in what if w not in lost]
    numbers = ", ".join(str(lost.index(w) + 1) for w in what)
    return f"{verdict.works}, without {numbers}" if numbers else verdict.works


def page(text: str) -> str:
    """The page with the table made anew; the rest is as it was."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no place for the table: {BEGIN}")
    return head + block() + tail


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")
