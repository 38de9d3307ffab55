"""How right doctor is on failures that people reported (tests/captures/reports.txt), and what its confidence means.

    python -m benchmarks.doctor_reports [--logs FOLDER] [--file FILE] [--write]

The reports are shortened and typed again. The reliability table is over all labelled cases: the reports, the logs of other
people, and our own captures; `--write` puts it into docs/doctor.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.doctor_accuracy import CAPTURES, DOCS, LOGS, Labelled, Scored, of_others, of_ours
from lab.marked import placed
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.findings import Severity

REPORTS = CAPTURES / "reports.txt"
BEGIN, END = "<!-- reliability: python -m benchmarks.doctor_reports --write -->\n", "<!-- end of reliability -->"
CONFIDENT = 0.6
_MEMORY = {"yes": True, "no": False, "unknown": None}
_CASE = re.compile(r"^== (?P<name>[\w-]+): (?P<codes>[^:]*): (?P<memory>[^:]*): .*\n(?P<lines>(?:(?!== ).*\n?)*)", re.M)
_START = """A| Traceback (most recent call last):
A|   File "/app/vllm/v1/engine/utils.py", line 700, in wait_for_engine_startup
A| RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""
_FAILED = "(APIServer pid=1) ERROR 11-15 08:01:00 [async_llm.py:546]"
_DEATH = f"""{_FAILED} AsyncLLM output_handler failed.
{_FAILED} Traceback (most recent call last):
{_FAILED}   File "/app/vllm/v1/engine/core_client.py", line 883, in get_output_async
{_FAILED} vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the cause."""
_PREFIXES = (
    (r"^START$", _START.replace("\\", r"\\")), (r"^DEATH$", _DEATH), (r"^A\| ", "(APIServer pid=1) "),
    (r"^E\| ", "(EngineCore_DP0 pid=276) ERROR 11-15 08:00:05 [core.py:1] "),
    (r"^i\| ", "(EngineCore_DP0 pid=276) INFO 11-15 08:00:01 [core.py:1] "),
    (r"^W(\d)\| ", r"(Worker_TP\1 pid=30\1) ERROR 11-15 08:00:04 [multiproc_executor.py:1] "),
    (r"^R\| ", "(EngineCore_DP0 pid=276) (RayWorkerWrapper pid=29113, ip=10.45.7.181) ERROR 11-15 08:00:04 [ray_utils.py:1] "),
)  # fmt: skip


def of_reports(folder: Path, file: Path = REPORTS) -> Iterator[Labelled]:
    """The reports, each written as a log of its own into a folder."""
    for case in _CASE.finditer(file.read_text(encoding="utf-8")):
        text = case["lines"].strip("\n")
        for pattern, instead in _PREFIXES:
            text = re.sub(pattern, instead, text, flags=re.M)
        path = folder / f"{case['name']}.log"
        path.write_text(text + "\n", encoding="utf-8")
        codes = () if case["codes"] == "none" else tuple(case["codes"].split(", "))
        yield Labelled(case["name"], "reports", path, codes, tuple(_MEMORY[word] for word in case["memory"].split(", ")))


class Judged(NamedTuple):
    """One case, what was said of it, and how surely."""

    scored: Scored
    confidence: float

    @property
    def is_right(self) -> bool:
        """Whether the first code is one of the right ones, or none was given where none is wanted."""
        case = self.scored.labelled
        if case.source != "reports":
            return self.scored.code_is_right
        return self.scored.code in case.codes if case.codes else self.scored.code is None


def judged(cases: Sequence[Labelled]) -> list[Judged]:
    """Every case, judged alone."""
    found = []
    for case in cases:
        diagnosis = diagnose([read_log(str(case.path))])
        first = diagnosis.findings[0] if diagnosis.findings else None
        code = str(first.code) if first is not None and first.severity is not Severity.INFO else None
        found.append(Judged(Scored(case, code, diagnosis.memory_failure), first.confidence if first is not None else 1.0))
    return found


def reliability(found: Sequence[Judged]) -> str:
    """What is said at each confidence, and how often it is right; silence is left out."""
    lines = ["| confidence of the first finding | cases | right code first | right on memory |", "|---|---|---|---|"]
    said = [one for one in found if one.scored.code]
    for least, below in ((0.9, 1.01), (0.75, 0.9), (0.55, 0.75), (0.0, 0.55)):
        some = [one for one in said if least <= one.confidence < below]
        code, memory = sum(one.is_right for one in some), sum(one.scored.memory_is_right for one in some)
        share = [f"{count} ({count / len(some):.0%})" if some else "0" for count in (code, memory)]
        name = f"{least:.0%} and more" if below > 1 else f"{least:.0%} to {below:.0%}" if least else f"below {below:.0%}"
        lines.append(f"| {name} | {len(some)} | {share[0]} | {share[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and fail where a confidence promises more than it keeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--file", type=Path, default=REPORTS, help="other reports, written the same way")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("doctor_reports.py") else [])
    with tempfile.TemporaryDirectory() as folder:
        reports = judged(list(of_reports(Path(folder), options.file)))
        others = judged([*(of_others(options.logs) if options.logs.is_dir() else ()), *of_ours()])
    for one in reports:
        if not (one.is_right and one.scored.memory_is_right):
            case = one.scored.labelled
            print(f"  {case.name}: said {one.scored.code} ({one.confidence:.0%}), memory {one.scored.memory}; "
                  f"right is {case.codes}, {case.memory}")  # fmt: skip
    wrong = [one for one in reports if one.scored.memory is not None and not one.scored.memory_is_right]
    sure = sum(one.confidence >= CONFIDENT for one in wrong)
    print(f"{len(reports)} reports: {sum(one.is_right for one in reports)} right code first, "
          f"{sum(one.scored.memory_is_right for one in reports)} right on memory, {sure} confidently wrong")  # fmt: skip
    table = reliability([*reports, *others])
    print(table)
    if options.write:
        DOCS.write_text(placed(DOCS.read_text(encoding="utf-8"), BEGIN, END, f"{table}\n", DOCS), encoding="utf-8")


if __name__ == "__main__":
    main()
