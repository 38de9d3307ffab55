"""What the runs of lab/gpu/fleet.py found, as tables for docs/evidence.md; no GPU.

    python -m lab.fleet_score [lab/results/fleet-h200]
    python -m lab.fleet_score --counts lab/results/fleet-cpu      without times: the machine had other work
    python -m lab.fleet_score --pack DIR/rows FILE.json.gz        puts the rows of a run into one file

Lost is a request without a whole answer after the client's retries: `cut` had begun to answer, `lost` had not. Refused answers
(503 with Retry-After) are counted apart. An engine is in service when HAProxy sends it work and its processes are at work.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "fleet-h200"
PROMISE_S = 2.0  # to the first token
LATER_S = 2.0  # a request that was sent so long after the fault cannot have been running when it came
ORDER = (
    "planned", "core", "api", "both", "stopped", "killer", "burst", "knob", "compact", "shed",
    "asker", "guard-drain", "guard-stop", "guard-start",
)  # fmt: skip
WAYS = ("nothing", "supervisor", "plimsoll")
# Of plimsoll's way, what must be true at each incident's end, beside what is said of requests: which engines are other
# processes than before (each was started once), and what was told.
ENDS = {
    "planned": ("victim", "restart accepted"), "core": ("victim", ""), "api": ("victim", ""), "stopped": ("victim", ""),
    "both": ("both", ""), "guard-drain": ("none", "killed in step drain"), "guard-stop": ("victim", "killed in step stop"),
    "guard-start": ("victim", "killed in step ready"), "burst": ("none", ""), "knob": ("none", "in force: max-num-seqs=2"),
    "compact": ("none", "compact accepted"), "shed": ("none", "refused by it: [1-9]"),
    "killer": ("none", r"contained: (?:[1-9]|\d+, [1-9])"),
    "asker": ("none", r"more: refused with .*compact accepted.*: given with"),
}  # fmt: skip
TIMES = ("first token over 2 s", "restarted after, s", "full service after, s", "engine-seconds out")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """One incident of one fleet, in numbers. Times are seconds after the fault; None: never while it was watched."""

    asked: int
    whole: int
    cut: int
    lost: int
    lost_later: int  # of cut and lost: those sent after the fault
    refusals: int
    sent_again: int
    thrown_away: int  # tokens of the answers that were cut: whoever asks again has them computed again
    slow: int
    acted_s: float | None
    whole_s: float | None
    out_s: float  # engine-seconds without service
    persons: int


def figures(row: Row) -> Figures:
    """The numbers of one row."""
    asked, fault = row["asked"], row["fault_at"]
    failed = [one for one in asked if one["end"] != "whole"]
    first = [row["before"][name] for name in sorted(row["before"])]
    looks = [look for look in row["looks"] if look[0] >= 0]
    acted = next((at for at, _, pids in looks if any(p not in (0, q) for p, q in zip(pids, first, strict=True))), None)
    out = sum((later[0] - look[0]) * later[1].count(False) for look, later in pairwise(looks))
    return Figures(
        asked=len(asked),
        whole=len(asked) - len(failed),
        cut=sum(one["end"] == "cut" for one in failed),
        lost=sum(one["end"] != "cut" for one in failed),
        lost_later=sum(one["sent"] > fault + LATER_S for one in failed),
        refusals=sum(one["refusals"] for one in asked),
        sent_again=sum(one["tries"] > 1 for one in asked),
        thrown_away=sum(one["tokens"] for one in failed if one["end"] == "cut"),
        slow=sum(one["end"] == "whole" and (one["first"] or 0.0) > PROMISE_S for one in asked),
        acted_s=acted,
        whole_s=None if row["back_at"] is None else round(row["back_at"] - fault, 1) if row["breaks"] else 0.0,
        out_s=round(out, 1),
        persons=row["persons"],
    )


def read(folder: Path) -> list[Row]:
    """Every row that was played to its end; one that was played again counts as it went the last time."""
    found: dict[tuple[str, str, int], Row] = {}
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found |= {(row["incident"], row["way"], row["round"]): row for row in json.load(file) if "wrong" not in row}
    return list(found.values())


def spread(values: Sequence[float | None], never: str = "never") -> str:
    """One number, or the least and the greatest; `never` where one has none."""
    known = sorted(value for value in values if value is not None)
    text = " to ".join(f"{value:,g}" for value in dict.fromkeys(known[:1] + known[-1:]))
    missing = len(values) - len(known)
    return text if not missing else never if not known else f"{text}; {never} in {missing}"


def table(rows: Sequence[Row], *, has_times: bool = True) -> str:
    """One line for each incident and way, over its rounds."""
    head = ("incident", "way", "rounds", "requests", "cut", "lost", "of these sent later", "told to wait", "sent again",
            "tokens thrown away", *(TIMES if has_times else ()), "persons")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for incident in ORDER:
        for way in WAYS:
            found = [figures(row) for row in rows if (row["incident"], row["way"]) == (incident, way)]
            if not found:
                continue
            names = ("asked", "cut", "lost", "lost_later", "refusals", "sent_again", "thrown_away", "slow")
            cells = [str(sum(getattr(one, name) for one in found)) for name in names[: 7 + has_times]]
            if has_times:
                cells.append(spread([one.acted_s for one in found], "no restart"))
                cells += [spread([getattr(one, name) for one in found]) for name in ("whole_s", "out_s")]
            lines.append((incident, way, str(len(found)), *cells, str(sum(one.persons for one in found))))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def broken(rows: Sequence[Row]) -> list[str]:
    """What plimsoll promised and did not keep, one line each."""
    found = []
    for row in rows:
        if row["way"] != "plimsoll":
            continue
        one, name = figures(row), f"{row['incident']} round {row['round']}"
        if row["may_lose"] == "nothing" and one.cut + one.lost:
            found.append(f"{name}: {one.cut + one.lost} requests lost where none may be")
        if row["may_lose"] == "running" and one.lost_later:
            found.append(f"{name}: {one.lost_later} requests lost that were sent after the fault")
        if one.whole_s is None:
            found.append(f"{name}: not in full service without a person")
        who, told = ENDS[row["incident"]]
        names = sorted(row["before"])
        wanted = {"none": [], "victim": [row["victim"]], "both": names}[who]
        restarted = [place for place, pid in zip(names, row["looks"][-1][2], strict=True) if pid != row["before"][place]]
        if restarted != wanted:
            found.append(f"{name}: other processes than before: {restarted}, not {wanted}")
        elif (starts := sum(step == "start" for *_, step in row["steps"])) != len(wanted):
            found.append(f"{name}: {starts} starts of {len(wanted)} engines")
        if not re.search(told, row["told"]):
            found.append(f"{name}: {row['told']}")
    return found


def main(words: Sequence[str]) -> int:
    """Print the tables, or pack a run."""
    if words[:1] == ["--pack"]:
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(words[1]).glob("*.json"))]
        with gzip.open(words[2], "wt", encoding="utf-8") as file:
            json.dump(rows, file, separators=(",", ":"))
        return 0
    folders = [word for word in words if word != "--counts"]
    folder = Path(folders[0]) if folders else RESULTS
    rows = read(folder)
    if not rows:
        raise SystemExit(f"{folder} holds no rows (*.json.gz)")
    print("not kept:", *(broken(rows) or ["nothing"]), sep="\n- ")
    print()
    print(table(rows, has_times="--counts" not in words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
