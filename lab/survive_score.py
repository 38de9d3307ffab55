"""What the runs of lab/gpu/measure_survive.py found, as tables for docs/evidence.md; no GPU.

python -m lab.survive_score [lab/results/survive-h200]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.paired import upper_bound

RESULTS = Path(__file__).resolve().parent / "results" / "survive-h200"
WAYS = ("plain", "contained", "door")
RUNNERS = {"0": "first", "1": "second", "": "default"}
Row = dict[str, Any]
Key = tuple[str, str, str, str]


def read(folder: Path) -> list[Row]:
    """Every run's row; of several with one name the last that went well, but each of the overhead: its pairs add up."""
    found: dict[str, Row] = {}
    for path in sorted(folder.glob("survive-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            is_good = row["ready"] and row["wrong"] is None
            key = f"overhead {path.stem}" if row["name"] == "overhead" else row["name"]
            if is_good or key not in found:
                found[key] = with_aborted(row)
    return list(found.values())


def with_aborted(row: Row) -> Row:
    """The row with the killers that the engine says it aborted, where their clients were told no more than "an error"."""
    left = ((row.get("state") or {}).get("aborted")) or 0
    for part in ("round", "again"):
        lost = row.get(part, {}).get("killers_lost", 0)
        if lost and left:
            moved = min(lost, left)
            left -= moved
            counts = {"lost": -moved, "aborted": moved, "killers_lost": -moved, "killers_aborted": moved}
            row = {**row, part: {**row[part], **{name: row[part][name] + change for name, change in counts.items()}}}
    return row


def good(rows: Iterable[Row]) -> list[Row]:
    """Runs of killers that were played to their end."""
    return [row for row in rows if row["ready"] and row["wrong"] is None and "round" in row]


def grouped(rows: Iterable[Row]) -> dict[Key, dict[str, list[Row]]]:
    """Runs by killer, shape, mode and runner, then by way."""
    found: dict[Key, dict[str, list[Row]]] = {}
    for row in good(rows):
        if row["name"].startswith("invariant-"):
            continue
        key = (row["killer"], row["shape"], row["mode"], row["runner"])
        found.setdefault(key, {}).setdefault(row["way"], []).append(row)
    return found


def start_seconds(rows: Iterable[Row], shape: str, mode: str) -> float | None:
    """The fastest start of such a server that was seen: for at least so long a dead one is out of service."""
    starts = [row["reach_s"] + row["ready_s"] for row in rows if row["ready"] and (row["shape"], row["mode"]) == (shape, mode)]
    return min(starts, default=None)


def out_of_service(way_rows: Sequence[Row], start_s: float | None) -> str:
    """How long nobody was served: the time of a start where the server died, the longest standstill where it lived."""
    if any(row["died"] for row in way_rows):
        return "until restarted" if start_s is None else f"> {start_s:.0f} s"
    stills = [row["round"]["still_s"] for row in way_rows if row["round"]["still_s"] is not None]
    return f"{max(stills):.2f} s" if stills else "unknown"


def count(way_rows: Sequence[Row], part: str, *ends: str) -> int:
    """Requests of all rounds that ended so."""
    return sum(row[part][end] for row in way_rows for end in ends)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def number(value: float | None, digits: int = 0) -> str:
    """A figure with thousands apart; a dash for what is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def speed(way_rows: Sequence[Row], part: str) -> str:
    """Tokens a second of this part of the runs, the mean; 0 where every server was dead."""
    return number(mean(row[part]["tokens_per_s"] for row in way_rows if part in row))


def tokens_equal(way_rows: Sequence[Row]) -> str:
    """How many answers of contained rounds had the tokens of an undisturbed run."""
    found = [row["round"]["tokens_as_undisturbed"] for row in way_rows if "tokens_as_undisturbed" in row["round"]]
    compared = sum(one["compared"] for one in found)
    return f"{sum(one['equal'] for one in found)} of {compared}" if compared else "-"


def floor_equal(way_rows: Sequence[Row]) -> str:
    """How many answers two undisturbed runs of one server had in common: what no comparison can exceed."""
    found = [row["undisturbed_twice"] for row in way_rows if "undisturbed_twice" in row]
    compared = sum(one["compared"] for one in found)
    return f"{sum(one['equal'] for one in found)} of {compared}" if compared else "-"


def table(head: str, lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, from a head with its columns apart by bars."""
    width = head.count("|") + 1
    return [f"| {head} |", "|" + "---|" * width, *("| " + " | ".join(cells) + " |" for cells in lines)]


def service_cells(key: Key, way: str, way_rows: Sequence[Row], start_s: float | None) -> list[str]:
    """One line of the first table."""
    requests = sum(row["round"]["requests"] for row in way_rows)
    afterwards = sum(row["after"]["requests"] for row in way_rows)
    died = sum(bool(row["died"]) for row in way_rows)
    ends = [str(count(way_rows, "round", end)) for end in ("lost", "refused", "aborted")]
    return [
        *key[:3], RUNNERS.get(key[3], key[3]), way, str(len(way_rows)), f"{count(way_rows, 'round', 'served')} of {requests}",
        *ends, f"{died} of {len(way_rows)}", out_of_service(way_rows, start_s),
        f"{count(way_rows, 'after', 'served')} of {afterwards}",
    ]  # fmt: skip


def service_table(rows: Sequence[Row]) -> list[str]:
    """Requests served, lost and refused, by killer and way."""
    head = "killer | shape | mode | runner | way | rounds | served | lost | refused | aborted | servers that died"
    lines = []
    for key, ways in sorted(grouped(rows).items()):
        start_s = start_seconds(rows, key[1], key[2])
        lines += [service_cells(key, way, ways[way], start_s) for way in WAYS if way in ways]
    return table(f"{head} | nobody served for | 12 afterwards", lines)


def speed_cells(key: Key, way: str, found: Sequence[Row], calm: Sequence[Row]) -> list[str]:
    """One line of the second table; `calm` are the runs that have an undisturbed round."""
    still, still_calm = mean(r["round"]["still_s"] for r in found), mean(r["undisturbed"]["still_s"] for r in calm)
    failures = ", ".join(str(row["round"]["contained"]) for row in found)
    sites = ", ".join(sorted({site for row in found for site in row["round"]["sites"]}))
    steps = ", ".join(map(str, sorted({row.get("steps", {}).get("round") for row in found} - {None})))
    speeds = [speed(found, "before"), speed(found, "round"), speed(calm, "undisturbed"), speed(found, "after")]
    stills = f"{number(still, 2)} ({number(still_calm, 2)})"
    ends = [failures, sites or "-", steps or "-", tokens_equal(found), floor_equal(calm)]
    return [*key[:3], RUNNERS.get(key[3], key[3]), way, *speeds, stills, *ends]


def speed_table(rows: Sequence[Row]) -> list[str]:
    """Tokens a second before, during and after, standstills, and what containment did."""
    head = "killer | shape | mode | runner | way | tokens/s: 12 before | round | undisturbed round | 12 after"
    more = "all still, s (undisturbed) | contained | where | tokens a step then | tokens as undisturbed | two undisturbed"
    lines = []
    for key, ways in sorted(grouped(rows).items()):
        calm = [row for row in ways.get("contained", ()) if "undisturbed" in row]
        lines += [speed_cells(key, way, ways[way], calm) for way in ("contained", "door") if way in ways]
    return table(f"{head} | {more}", lines)


def totals(rows: Sequence[Row]) -> list[str]:
    """One line for each way: rounds, requests, servers that died."""
    everything = [row for row in good(rows) if not row["name"].startswith("invariant-")]
    lines = []
    for way in WAYS:
        found = [row for row in everything if row["way"] == way]
        ends = [str(count(found, "round", end)) for end in ("served", "lost", "refused", "aborted")]
        requests = str(sum(row["round"]["requests"] for row in found))
        lines.append([way, str(len(found)), requests, *ends, str(sum(bool(row["died"]) for row in found))])
    return table("way | rounds | requests | served | lost | refused | aborted | servers that died", lines)


def again_table(rows: Sequence[Row]) -> list[str]:
    """The same killers once more on the same server, memory still short: the size that failed is not tried again."""
    lines = []
    for row in sorted((row for row in good(rows) if "again" in row), key=lambda one: str(one["name"])):
        part = row["again"]
        served = f"{part['served']} of {part['requests']}"
        lines.append(
            [row["name"], str(row["round"]["contained"]), str(part["contained"]), served, number(part["tokens_per_s"])]
        )
    return table("run | contained at first | contained again | served again | tokens/s again", lines) if lines else []


def invariant_table(rows: Sequence[Row]) -> list[str]:
    """Runs under vLLM's batch invariance, where the same request has the same tokens in any company."""
    found = [row for row in good(rows) if row["name"].startswith("invariant-")]
    lines = [
        [
            row["name"],
            str(row["round"]["contained"]),
            tokens_equal([row]),
            floor_equal([row]),
            str(row["round"]["distinct_tokens"]),
        ]
        for row in found
    ]
    return table("run | contained | tokens as undisturbed | two undisturbed | different tokens seen", lines) if lines else []


def trial_table(rows: Sequence[Row]) -> list[str]:
    """Certificates: requests inside that failed, and whether one outside ended the server."""
    found = [row for row in rows if row["killer"] == "trial" and row["ready"] and row["wrong"] is None]
    if not found:
        return []
    lines = []
    for row in found:
        sent = str(sum(one["sent"] for one in row["inside"]))
        verdict, end = ("yes" if row[name] else "no" for name in ("certified", "died_outside"))
        name = row["name"].removeprefix("trial-")
        lines.append([name, verdict, sent, str(row["inside_failed"]), str(len(row["outside"])), end])
    failed = sum(row["inside_failed"] for row in found)
    tried = sum(bool(row["outside"]) for row in found)
    ended = sum(bool(row["died_outside"]) for row in found)
    words = (
        f"{len(found)} commands: {failed} requests inside failed; {ended} of {tried} servers were ended by requests outside."
    )
    return [*table("command | certified | inside: sent | failed | outside: kinds tried | ended the server", lines), "", words]


def overhead_lines(rows: Sequence[Row]) -> list[str]:
    """What containment costs where nothing fails: each pair of servers, then all their pairs of runs together."""
    found = [row for row in rows if row["name"] == "overhead" and row["wrong"] is None]
    if not found:
        return []
    lines = []
    for number, row in enumerate(found, 1):
        result, gap = row["result"], row["result"]["gap_p50_ms"]
        ratios = ", ".join(f"{ratio:.4f}" for ratio in result["ratios"])
        lines.append([str(number), ratios, f"{-result['mean']:+.2%}", f"{gap['with']:.2f} / {gap['without']:.2f}"])
    losses = [1 - ratio for row in found for ratio in row["result"]["ratios"]]
    by_server = [row["result"]["mean"] for row in found]
    same = [row["same_answers"] for row in found]
    equal, compared, tokens = (sum(one[key] for one in same) for key in ("equal", "compared", "tokens"))
    change = f"{-statistics.fmean(losses):+.2%} tokens a second with it, {bound_in_words(losses)}"
    reason = "since two that start together differ from the next two by more than their runs do"
    return [
        *table("servers | tokens a second, with / without, each pair | change with it | median gap, ms, with / without", lines),
        "",
        f"{len(losses)} pairs: {change}; counted by pairs of servers, {reason}, {bound_in_words(by_server)}.",
        f"{equal} of {compared} requests, sent one at a time, got equal tokens ({tokens} tokens).",
    ]


def bound_in_words(losses: Sequence[float]) -> str:
    """What the mean loss stays below, where there are enough of them to say so."""
    upper = upper_bound(losses)
    return "the bound unknown" if upper is None else f"a loss of at most {upper:.2%} with 95 % confidence"


def wrong_lines(rows: Sequence[Row]) -> list[str]:
    """Runs that could not be played, with the end of what went wrong."""
    bad = [row for row in rows if row["wrong"] is not None or not row["ready"]]
    return [
        f"- `{row['name']}`: {str(row['wrong']).strip().splitlines()[-1][:160] if row['wrong'] else 'not ready'}" for row in bad
    ]


def report(rows: Sequence[Row]) -> str:
    """Every table that the results have something for."""
    parts = [
        ("All rounds", totals(rows)), ("Requests", service_table(rows)), ("Speed and tokens", speed_table(rows)),
        ("The same killers again", again_table(rows)), ("Tokens under batch invariance", invariant_table(rows)),
        ("Where nothing fails", overhead_lines(rows)), ("Certificates", trial_table(rows)), ("Not played", wrong_lines(rows)),
    ]  # fmt: skip
    return "\n".join("\n".join([f"## {title}", "", *lines, ""]) for title, lines in parts if lines)


def main(arguments: list[str]) -> int:
    """Print the tables of a folder of results."""
    folder = Path(arguments[0]) if arguments else RESULTS
    rows = read(folder)
    if not rows:
        print(f"survive_score: {folder}: no survive-*.json. Run lab.gpu.measure_survive first.", file=sys.stderr)
        return 2
    print(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
