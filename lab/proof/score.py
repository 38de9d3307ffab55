"""What was foreseen against what happened: python -m lab.proof.score [--write]

Reads lab/results/proof-h200 (what plan said before the runs, what became of them) and the logs in tests/captures, asks plan and
doctor as they are today, and prints the tables of docs/evidence.md; `--write` puts them there. Needs no GPU.
"""

from __future__ import annotations

import gzip
import json
import shlex
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lab.proof.foresee import CONTEXT_MIB, ENTRIES, TOTAL_MIB, answer, command, prediction, side, write_models
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.units import GIB
from plimsoll.vllm.log_lines import Measured, measured_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "proof-h200"
CAPTURES = ROOT / "tests" / "captures" / "vllm-0.25.1-h200-proof"
EARLIER = ROOT / "tests" / "captures" / "vllm-0.25.1-h200-failures"
CARD = 150_109_880_320
SIDES = {1: "inside", 0: "within its band", -1: "outside"}
MOST_OVER = 0.005 * CARD  # KV promised that was not there
MOST_UNDER_GIB = 0.3
Entry = dict[str, Any]


class Run(NamedTuple):
    """One run: what plan said before and says today, what became of it, what its log says and what doctor makes of it."""

    told: Entry
    before: Entry
    today: Entry
    side: int  # of its line, by plan today: 1 inside, -1 outside, 0 within the band
    became: Entry
    right: tuple[str, ...]  # codes that are right as the first finding; none: a server that is well
    measured: Measured
    said: tuple[str, ...]  # by doctor, in its order

    @property
    def name(self) -> str:
        """As in entries.json; the two sides of a line end in -inside and -outside."""
        return str(self.told["name"])

    @property
    def served(self) -> bool:
        """Whether it came up and answered all it was asked."""
        return bool(self.became["ready"]) and not any(load["failed"] for load in self.became["loads"])

    @property
    def typed(self) -> str:
        """The command, and what a neighbour does with how many MiB."""
        left = "".join(f", beside a neighbour told to `{words}`" for words in self.told.get("ballast", ()))
        return f"`{shlex.join(command(self.told, self.told['model']))}`{left}"


class Score(NamedTuple):
    """A start's errors in GiB; positive overhead errors are on the safe side, positive KV errors are not."""

    overhead: float  # measured: what was requested less weights and KV
    overhead_error: float
    kv_error: float
    in_band: bool

    @property
    def is_near(self) -> bool:
        """Within 0.3 GiB or 15 %."""
        return abs(self.overhead_error) <= max(0.3, 0.15 * self.overhead)

    @property
    def is_safe(self) -> bool:
        """Overhead not under by more than 0.3 GiB, KV not over by more than 0.5 % of the card."""
        return self.overhead_error >= -MOST_UNDER_GIB and self.kv_error * GIB <= MOST_OVER


@cache
def runs() -> tuple[Run, ...]:
    """Every run of the proof, in the order of the list."""
    foreseen = {row["name"]: row for row in _read(RESULTS / "foreseen.json")}
    models = json.loads(ENTRIES.read_text(encoding="utf-8"))["models"]
    # One more run lies beside the list: what one block more does to blocks-llama-2.
    became = [row for row in _read(RESULTS / "results.json") if row["name"] in foreseen]
    return _looked_at([(foreseen[row["name"]], row) for row in became], models, CAPTURES)


@cache
def earlier() -> tuple[Run, ...]:
    """The failures of `lab.gpu.provoke_failures`, of which plan was asked only afterwards."""
    told = json.loads((ROOT / "lab" / "gpu" / "failure_runs.json").read_text(encoding="utf-8"))
    became = {row["name"]: row for row in _read(EARLIER / "results.json")}
    failed = [entry for entry in told["runs"] if entry["name"] in became and entry["expect"]]
    pairs = [(_as_told(entry, became[entry["name"]]), became[entry["name"]]) for entry in failed]
    found = _looked_at(pairs, told["models"], EARLIER)
    return tuple(run for run in found if run.told["expect"] in run.right)  # a storm of preemptions is not in its log


def _as_told(entry: Entry, became: Entry) -> Entry:
    if "kv_leave_mib" in entry:
        size = str((TOTAL_MIB - CONTEXT_MIB - entry["kv_leave_mib"]) << 20)
    elif "kv_like" in entry:  # what an earlier run left free decided it, so it is known only from the run
        size = became["args"][became["args"].index("--kv-cache-memory-bytes") + 1]
    else:
        return entry
    return entry | {"args": [*entry["args"], "--kv-cache-memory-bytes", size]}


def _looked_at(pairs: list[tuple[Entry, Entry]], models: Entry, captures: Path) -> tuple[Run, ...]:
    labels = {row["name"]: row for row in _read(captures / "labels.json")}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(models, Path(folder))
        for told, became in pairs:
            log = next(path for ending in ("log", "log.gz") if (path := captures / f"{told['name']}.{ending}").is_file())
            text = gzip.decompress(log.read_bytes()) if log.suffix == ".gz" else log.read_bytes()
            planned = answer(told, Path(folder))
            line = told.get("edge", {}).get("line")
            found.append(
                Run(
                    told, told.get("plan", {}), prediction(planned), side(planned.ledger, line) if line else 0, became,
                    tuple(labels[told["name"]]["expect"]), measured_of(text.split(b"\n")),
                    tuple(str(finding.code) for finding in diagnose([read_log(str(log))]).findings),
                )
            )  # fmt: skip
    return tuple(found)


def _read(path: Path) -> list[Entry]:
    return list(json.loads(path.read_text(encoding="utf-8")))


def score(run: Run, said: Entry) -> Score:
    """A start against one answer of plan."""
    terms, measured = said["terms"], run.measured
    assert measured.weights_bytes is not None, run.name
    assert measured.kv_bytes is not None, run.name
    overhead = terms["requested"][0] - measured.weights_bytes - measured.kv_bytes
    planned = sum(terms[term][0] for term in ("non_torch", "activation", "graphs"))
    low, high = terms["kv"][1:]
    return Score(overhead / GIB, (planned - overhead) / GIB, (terms["kv"][0] - measured.kv_bytes) / GIB,
                 low <= measured.kv_bytes <= high)  # fmt: skip


def starts() -> tuple[Run, ...]:
    """The starts that were measured, in the order of the list."""
    return tuple(run for run in runs() if run.told["kind"] == "start")


def lines() -> tuple[tuple[Run, Run], ...]:
    """Inside and outside of every line."""
    by_name = {run.name: run for run in runs()}
    inside = [name for name in by_name if name.endswith("-inside")]
    return tuple((by_name[name], by_name[name.removesuffix("inside") + "outside"]) for name in inside)


def failures() -> tuple[Run, ...]:
    """Every run that failed, whether it was meant to or not."""
    return tuple(run for run in runs() if run.right)


def foresight(run: Run, said: Entry) -> str:
    """How a failure was foreseen: "named", "stopped" (another step was named), "warned" or "no"."""
    codes = said["findings"]
    if codes and codes[0][1] == "critical":
        return "named" if codes[0][0] in run.right else "stopped"
    return "warned" if codes else "no"


def held(inside: Run, outside: Run) -> bool:
    """Whether the server flipped between the two points that plan named before, to the very ends that it named."""
    wanted = [(run.told["expect"],) if run.told["expect"] else () for run in (inside, outside)]
    return [inside.right, outside.right] == wanted


def _start_rows(chosen: tuple[Run, ...]) -> list[str]:
    rows = ["| start | half | command | overhead, GiB | error before | today | KV error before, of card | today | in band |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for run in chosen:
        before, today = score(run, run.before), score(run, run.today)
        cells = (run.name, run.told["half"], run.typed, f"{before.overhead:.2f}",
                 _error(before), _error(today), _share(before.kv_error), _share(today.kv_error),
                 "yes" if today.in_band else "no")  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _error(one: Score) -> str:
    return f"{one.overhead_error:+.2f}" if one.is_near else f"**{one.overhead_error:+.2f}**"


def _share(error: float) -> str:
    text = f"{error * GIB / CARD:+.2%}"
    return text if error * GIB <= MOST_OVER else f"**{text}**"


def _line_rows() -> list[str]:
    rows = ["| line | half | command, without the knob | inside | became | outside | became | held | plan today |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for inside, outside in lines():
        at = [_knob(run) for run in (inside, outside)]
        typed = inside.typed.replace(f" {at[0]}", "").split(", ")[0]
        today = ", ".join(SIDES[run.side] for run in (inside, outside))
        cells = (inside.name.removesuffix("-inside"), inside.told["half"], typed, at[0], _became(inside), at[1],
                 _became(outside), "yes" if held(inside, outside) else "**no**", today)  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _knob(run: Run) -> str:
    knob = run.told["edge"]["knob"]
    if knob == "leave":
        return f"{run.told['ballast'][0].split()[1]} MiB left free"
    return f"{knob} {run.told['args'][-1]}"


def _became(run: Run) -> str:
    if run.right:
        return " or ".join(run.right)
    return "serves" if run.served else "starts; one request of full length waits for ever"


def _failure_rows(chosen: tuple[Run, ...]) -> list[str]:
    before = any(run.before for run in chosen)
    rows = [f"| failure | command | what it was |{' plan before |' if before else ''} plan today | doctor first |"]
    rows.append("|---" * (6 if before else 5) + "|")
    for run in chosen:
        first = "right" if is_right(run) else f"**{run.said[0] if run.said else 'nothing'}**"
        seen = [_seen(run, said) for said in ((run.before, run.today) if before else (run.today,))]
        rows.append(f"| {' | '.join((run.name, run.typed, ' or '.join(run.right), *seen, first))} |")
    return rows


def is_right(run: Run) -> bool:
    """Whether doctor's first finding is what it was."""
    return bool(run.said) and run.said[0] in run.right


def _seen(run: Run, said: Entry) -> str:
    how = foresight(run, said)
    return how if how in ("named", "no") else f"{how}: {said['findings'][0][0]}"


def summary() -> list[str]:
    """The figures that were promised."""
    out = ["| figure | before | today |", "|---|---|---|"]
    groups = (("all starts", starts()), ("half a", _half("a")), ("half b", _half("b")), ("drawn up afterwards", _half("c")))
    for title, chosen in (group for group in groups if group[1]):
        both = [[score(run, getattr(run, when)) for run in chosen] for when in ("before", "today")]
        near = [f"{sum(one.is_near for one in many)} of {len(many)}" for many in both]
        inside = [f"{sum(one.in_band for one in many)} of {len(many)}" for many in both]
        out += [
            _row(f"{title}: overhead within 0.3 GiB or 15 %", near),
            _row(
                f"{title}: overhead furthest under, GiB", [f"{min(one.overhead_error for one in many):+.2f}" for many in both]
            ),
            _row(f"{title}: KV furthest over, of the card", [_share(max(one.kv_error for one in many)) for many in both]),
            _row(f"{title}: KV in its band", inside),
        ]
    seen = [[foresight(run, getattr(run, when)) for run in failures()] for when in ("before", "today")]
    words = ("named", "stopped", "warned", "no")
    return [
        *out,
        *(_row(f"failures, foreseen: {how}", [f"{many.count(how)} of {len(many)}" for many in seen]) for how in words),
        _row("failures that doctor names first", ["", f"{sum(map(is_right, failures()))} of {len(failures())}"]),
        _row("the same, plan asked afterwards", ["", f"{sum(map(is_right, earlier()))} of {len(earlier())}"]),
        *(
            _row(title, [f"{sum(held(*pair) for pair in pairs)} of {len(pairs)}", ""])
            for title, pairs in (("lines that held", _lines("ab")), ("lines drawn up afterwards that held", _lines("c")))
            if pairs
        ),
    ]


def _lines(halves: str) -> list[tuple[Run, Run]]:
    return [pair for pair in lines() if pair[0].told["half"] in halves]


def _half(half: str) -> tuple[Run, ...]:
    return tuple(run for run in starts() if run.told["half"] == half)


def _row(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def report() -> str:
    """The tables of docs/evidence.md."""
    parts = (
        ("In short", summary()),
        ("Starts", _start_rows(starts())),
        ("Lines", _line_rows()),
        ("Failures", _failure_rows(failures())),
        ("Failures of which plan was asked afterwards", _failure_rows(earlier())),
    )
    return "\n\n".join(f"## {title}\n\n" + "\n".join(rows) for title, rows in parts)


def main(arguments: list[str]) -> int:
    """Print the tables; with --write, put them into the docs."""
    text = report()
    print(text)
    if "--write" in arguments:
        page = ROOT / "docs" / "evidence.md"
        old = page.read_text(encoding="utf-8")
        before, after = old.split("<!-- tables -->")[0], old.split("<!-- end -->")[1]
        page.write_text(f"{before}<!-- tables -->\n\n{text}\n\n<!-- end -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
