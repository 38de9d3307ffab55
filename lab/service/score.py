"""What the service runs on a GPU showed, and what simulate says of them: python -m lab.service.score [--write]

Reads lab/results/service-h200, replays its loads with step times fitted to other loads, and prints the tables of the second
part of docs/evidence.md; `--write` puts them there. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import simulate_h200
from lab.marked import placed
from lab.service.predict import Errors, activation_bytes, errors, fitted
from lab.service.runs import Load, by_setting, loads_in, measured
from lab.service.tuned import RESULTS, answer, model_in
from plimsoll.simulate.fit import fit
from plimsoll.simulate.settings import StepTime

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence.md"
OVERHEAD = ROOT / "docs" / "overhead.md"
SIZES = (16, 32, 64, 128)
AT_ONCE = 56  # requests of the block sizes' load: all run together
ALLOWED = 0.07  # or twice what two runs of the same differ by
GIB = 1 << 30
PAIRS = (
    ("overload-none-1", "overload-shed-1"),
    ("overload-none-2", "overload-shed-2"),
    ("overload-shed-1", "overload-none-1"),
    ("overload-shed-2", "overload-none-2"),
    ("unlimited-1", "seats-24-1"),
    ("unlimited-2", "seats-24-2"),
    ("seats-24-1", "unlimited-1"),
    ("seats-24-2", "unlimited-2"),
    ("graphs-unlimited-1", "graphs-seats-24-1"),
    ("graphs-unlimited-2", "graphs-seats-24-2"),
    ("graphs-seats-24-1", "graphs-unlimited-1"),
    ("graphs-seats-24-2", "graphs-unlimited-2"),
    ("article-1", "tuned-1"),
    ("article-2", "tuned-2"),
    ("tuned-1", "article-1"),
    ("tuned-2", "article-2"),
)
"""Fitted to the first, the second foretold: settings change, the card and the hour do not (article, tuned: eleven minutes)."""
STARTS = (
    ("starts", "article", "cold"),
    ("article", "article", "cold"),
    ("starts", "tuned", "cold"),
    ("tuned-segments", "tuned", "cold"),
    ("starts-again", "article", "warm"),
    ("starts-again", "tuned", "warm"),
)
"""A folder, a stage and what its first start found; a second start in the same stage found the cache warm."""
LOADED = ("seats", "seats-graphs", "blocks-shed", "tuned-segments", "article")
SEATS = 24
POOLS = (
    ("unlimited", "8,192 tokens in a step, eager"),
    ("segments-off", "16,384, eager"),
    ("segments-on", "16,384, eager, expandable_segments"),
    ("overload-none", "8,192, graphs"),
    ("article", "24,576, graphs, expandable_segments"),
    ("tuned", "the same, 24 requests at once"),
)
Row = Sequence[str]


class Seen(NamedTuple):
    """A load by the engine's own stamps."""

    duration_s: float
    ttft_s: float
    tpot_ms: float


class Spread(NamedTuple):
    """How far two runs of the same are apart, as shares of their mean."""

    duration: float
    ttft: float
    tpot: float


@cache
def all_loads() -> dict[str, Load]:
    """Every load that the tables speak of, by its name."""
    return {load.name: load for part in LOADED for load in loads_in(RESULTS / part)}


@cache
def seen(name: str) -> Seen:
    """What the engine stamped."""
    run = measured(all_loads()[name])
    assert run.first_token_ns is not None
    ttft = (run.first_token_ns - run.trace.arrival_ns) / 1e9
    further = (run.finish_ns - run.first_token_ns) / (run.trace.output - 1)
    return Seen(float(run.finish_ns.max()) / 1e9, float(ttft.mean()), float(further.mean()) / 1e6)


def spread(setting: str) -> Spread:
    """Of the two runs of a setting."""
    both = [seen(load.name) for load in by_setting(list(all_loads().values()))[setting]]
    return Spread(*(abs(one - other) / ((one + other) / 2) for one, other in zip(both[0], both[1], strict=True)))


@cache
def _step_times(name: str) -> StepTime:
    with tempfile.TemporaryDirectory() as place:
        return fitted(all_loads()[name], model_in(Path(place))).step_time


@cache
def foretold(fit_on: str, name: str) -> Errors:
    """One load replayed with the step times of another."""
    with tempfile.TemporaryDirectory() as place:
        return errors(all_loads()[name], _step_times(fit_on), model_in(Path(place)))


def _table(head: str, rows: Iterable[Row]) -> list[str]:
    names = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(names)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _of_run(name: str, *keys: str) -> list[Any]:
    found: Any = all_loads()[name].found
    return [found[key] for key in keys]


def _stage(folder: str, name: str) -> Any:
    return json.loads((RESULTS / folder / f"{name}.json").read_text(encoding="utf-8"))


def _rows(load: Load) -> list[dict[str, float]]:
    """What the server showed every second of this load."""
    return next(kept["rows"] for kept in _stage(load.folder.name, load.stage)["series"] if kept["load"] == load.name)


# The parts


def kernel() -> list[str]:
    """Milliseconds of one attention kernel, by block size and by where the blocks lie."""
    rows = json.loads((RESULTS / "blocks-kernel.json").read_text(encoding="utf-8"))
    table = []
    for row in rows:
        times = {layout: row["layouts"][layout]["median_ms"] for layout in ("contiguous", "interleaved", "shuffled")}
        apart = max(times.values()) / min(times.values()) - 1
        shape = f"{row['requests']} x {row['tokens_each']:,}"
        table.append([shape, str(row["block_size"]), *(f"{one:.3f}" for one in times.values()), f"{apart:.1%}"])
    return _table("requests x tokens | block | contiguous, ms | interleaved | shuffled | furthest apart", table)


def blocks() -> list[str]:
    """The whole server at each block size: the first round computes the prompts, the two others find them in the cache."""
    table = []
    for size in SIZES:
        rounds = [seen(f"block-{size}-{number}") for number in (1, 2, 3)]
        each_s = 1e3 * AT_ONCE / statistics.mean(one.tpot_ms for one in rounds[1:])
        table.append([str(size), *(f"{one.tpot_ms:.2f}" for one in rounds), f"{each_s:,.0f}"])
    return _table(
        f"block | ms a token, round 1 | round 2 | round 3 | {AT_ONCE} tokens over the mean of rounds 2 and 3, a second", table
    )


def shed() -> list[str]:
    """Thirty requests a second for twenty seconds, to a server that finishes eighteen."""
    table = []
    for name in ("overload-none-1", "overload-none-2", "overload-shed-1", "overload-shed-2"):
        good, each_s, done, told, ttft, preempted, failed = _of_run(
            name, "good", "good_per_s", "requests_per_s", "told_to_wait", "ttft_ms", "num_preemptions_total", "failed"
        )
        table.append(
            [name, f"{good} of 600", f"{each_s:.2f}", f"{done:.2f}", f"{ttft['p50'] / 1e3:.1f}", f"{ttft['p99'] / 1e3:.1f}",
             f"{told:,}", f"{preempted:.0f}", str(failed)]
        )  # fmt: skip
    head = "run | as promised | a second | finished a second | TTFT, half, s | 99 % | told to wait | preempted | failed"
    return _table(head, table)


def seats() -> list[str]:
    """The same 150 requests at once, with and without a limit."""
    return _seats("")


def seats_graphs() -> list[str]:
    """The same with CUDA graphs."""
    return _seats("graphs-")


def _seats(kind: str) -> list[str]:
    table = []
    for name in (f"{kind}{setting}-{number}" for setting in ("unlimited", "seats-24") for number in (1, 2)):
        done, preempted, most = _of_run(name, "requests_per_s", "num_preemptions_total", "most_running")
        run = seen(name)
        table.append(
            [
                name,
                f"{run.duration_s:.1f}",
                f"{done:.2f}",
                f"{run.ttft_s:.1f}",
                f"{run.tpot_ms:.1f}",
                f"{preempted:.0f}",
                f"{most:.0f}",
            ]
        )
    return _table("run | seconds | requests a second | mean TTFT, s | mean TPOT, ms | preempted | most at once", table)


def burst() -> list[str]:
    """The article's flags and tune's under the same burst of long prompts, and what tune had foretold of both."""
    said = answer("article-1")
    table = []
    for setting, foretold_as in (("article", said["own"]["score"]), ("tuned", said["score"])):
        for name in (f"{setting}-1", f"{setting}-2"):
            took, good, each_s, made, ttft, tpot, preempted, failed = _of_run(
                name, "seconds", "good", "good_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "num_preemptions_total",
                "failed",
            )  # fmt: skip
            latencies = [ttft["p50"] / 1e3, ttft["p99"] / 1e3, tpot["p50"], tpot["p99"]]
            table.append(_burst_row(name, took, made, good, each_s, latencies, [f"{preempted:.0f}", str(failed)]))
        latencies = [foretold_as[key] * scale for key, scale in _LATENCIES]
        table.append(
            _burst_row(f"`{setting}`, foretold", foretold_as["seconds"], foretold_as["output_tokens_per_second"],
                       foretold_as["met"], foretold_as["goodput"], latencies, [str(foretold_as["preemptions"]), ""])
        )  # fmt: skip
    head = "run | seconds | tokens a second | as promised | a second | TTFT, half, s | 99 % | TPOT, half, ms | 99 % | preempted"
    return _table(f"{head} | failed", table)


_LATENCIES = (("ttft_p50", 1.0), ("ttft_p99", 1.0), ("tpot_p50", 1e3), ("tpot_p99", 1e3))


def _burst_row(
    name: str, took_s: float, made: float, good: int, each_s: float, latencies: Sequence[float], ends: Sequence[str]
) -> Row:
    first, late, further, slow = latencies
    return [
        name, f"{took_s:.1f}", f"{made:.0f}", f"{good} of 64", f"{each_s:.2f}", f"{first:.1f}", f"{late:.1f}", f"{further:.0f}",
        f"{slow:.0f}", *ends,
    ]  # fmt: skip


def segments() -> list[str]:
    """Torch's memory with and without expandable_segments under one load."""
    table = []
    for setting in ("segments-off", "segments-on"):
        for kept in _stage("tuned-segments", setting)["series"]:
            rows, (done, tpot) = kept["rows"], _of_run(kept["load"], "requests_per_s", "tpot_ms")
            idle = [(row["reserved"] - row["allocated"]) / GIB for row in rows]
            high = max(row["reserved"] for row in rows) / GIB
            last = rows[-1]
            table.append(
                [kept["load"], f"{high:.2f}", f"{idle[0]:.2f}", f"{max(idle):.2f}", f"{last['alloc_retries']}",
                 f"{last['ooms']}", f"{done:.2f}", f"{tpot['mean']:.0f}"]
            )  # fmt: skip
    head = "run | reserved at most, GiB | unused before | at most | retries | failed allocations | requests a second"
    return _table(f"{head} | mean TPOT, ms", table)


def starts() -> list[str]:
    """How long a server is away when it is started again, against a compaction."""
    table = []
    for part, stage, first in STARTS:
        steps = _stage(part, stage)["steps"]
        waits = [row["said"]["ready_after_s"] for row in steps if row["step"][0] == "start"]
        table += [[stage, "warm" if number else first, f"{wait:.0f}"] for number, wait in enumerate(waits)]
    rows = [
        [f"start of `{name}`", f"compile cache {cache_is}", f"{wait} s without any answer"] for name, cache_is, wait in table
    ]
    for setting in ("segments-off", "segments-on"):
        steps = _stage("tuned-segments", setting)["steps"]
        said = next(row["said"] for row in steps if row["step"][0] == "say")["workers"][0]
        given = f"{said['returned'] / GIB:.2f} GiB given back"
        rows.append([f"compaction after `{setting}-2`", given, f"{1e3 * said['duration_s']:.1f} ms between two steps"])
    return _table("what | with | takes", rows)


def pace() -> list[str]:
    """What the host did to servers: steps of one load in its course, and further tokens as clients and engine saw them."""
    rows = _rows(all_loads()["seats-24-1"])
    spans = [
        (first, last)
        for first, last in zip(rows, rows[5:], strict=False)
        if min(first["num_requests_running"], last["num_requests_running"]) == SEATS
    ]
    steps = [
        1e3 * SEATS * (last["at"] - first["at"]) / (last["generation_tokens_total"] - first["generation_tokens_total"])
        for first, last in spans
    ]
    table = [["`seats-24-1`, 24 running: ms a step over five seconds", f"{min(steps):.0f} to {max(steps):.0f}"]]
    clients = [_of_run(f"block-{size}-{number}", "tpot_ms")[0]["mean"] for size in SIZES for number in (2, 3)]
    engine = [seen(f"block-{size}-{number}").tpot_ms for size in SIZES for number in (2, 3)]
    table += [
        ["`block-*`, rounds 2 and 3: ms a token at the clients", f"{min(clients):.1f} to {max(clients):.1f}"],
        ["the same in the engine", f"{min(engine):.1f} to {max(engine):.1f}"],
    ]
    for setting in ("article", "tuned"):
        full = max(row["kv_cache_usage_perc"] for number in (1, 2) for row in _rows(all_loads()[f"{setting}-{number}"]))
        table.append([f"`{setting}-*`: the cache was full to, at most", f"{full:.1%}"])
    return _table("figure | seen", table)


def pieces() -> list[str]:
    """How much more torch's pool takes than a batch has at once: for docs/overhead.md."""
    table = []
    for setting, steps in POOLS:
        loads = by_setting(list(all_loads().values()))[setting]
        pool = max(row["reserved"] - row["allocated"] for load in loads for row in _rows(load))
        with tempfile.TemporaryDirectory() as place:
            aside = activation_bytes(loads[0], model_in(Path(place)))
        table.append([f"`{setting}` ({steps})", f"{aside / GIB:.2f}", f"{pool / GIB:.2f}", f"{pool / aside - 1:.0%}"])
    return _table("load | activation planned, GiB | pool, GiB | over it", table)


def predictions() -> list[str]:
    """Simulate against the runs, each fitted to another."""
    rows = [foretold_row(fit_on, name) for fit_on, name in PAIRS]
    return _table("fitted to | foretold | duration | mean TTFT | mean TPOT | preemptions", rows)


def foretold_row(fit_on: str, name: str) -> list[str]:
    """How far off one load was, and how far it may be."""
    found, allowed = foretold(fit_on, name), [max(ALLOWED, 2 * one) for one in noise(fit_on, name)]
    cells = [_judged(error, limit) for error, limit in zip(found[:3], allowed, strict=True)]
    return [fit_on, name, *cells, f"{found.preemptions} for {found.preemptions_measured}"]


def another_day() -> list[str]:
    """The same with step times of four runs of the day before, with other flags and traffic, on another card of the kind."""
    table = []
    for fit_on in simulate_h200.BLOCKS:
        run = simulate_h200.load(fit_on)
        times = fit(run, simulate_h200.settings_of(fit_on), start=simulate_h200.data_sheet()).step_time
        with tempfile.TemporaryDirectory() as place:
            found = errors(all_loads()["overload-none-1"], times, model_in(Path(place)))
        cells = [_judged(error, ALLOWED) for error in found[:3]]
        table.append([fit_on, *cells, f"{found.preemptions} for {found.preemptions_measured}"])
    return _table("fitted to | duration | mean TTFT | mean TPOT | preemptions", table)


def noise(fit_on: str, name: str) -> Spread:
    """The larger spread of the two settings."""
    both = (spread(all_loads()[fit_on].setting), spread(all_loads()[name].setting))
    return Spread(*(max(pair) for pair in zip(*both, strict=True)))


def _judged(error: float, allowed: float) -> str:
    text = f"{error:+.1%} (of {allowed:.0%})"
    return text if abs(error) <= allowed else f"**{text}**"


PARTS: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("kernel", kernel),
    ("blocks", blocks),
    ("shed", shed),
    ("burst", burst),
    ("seats", seats),
    ("seats with graphs", seats_graphs),
    ("segments", segments),
    ("starts", starts),
    ("pace", pace),
    ("predictions", predictions),
    ("another day", another_day),
    ("pieces", pieces),
)


def page_of(name: str) -> Path:
    """Where a part is shown."""
    return OVERHEAD if name == "pieces" else PAGE


def main(arguments: list[str]) -> int:
    """Print every table; with --write, put each between its marks."""
    for name, part in PARTS:
        made, page = "\n".join(part()), page_of(name)
        print(f"{name}\n\n{made}\n")
        if "--write" in arguments:
            text = placed(
                page.read_text(encoding="utf-8"), f"<!-- {name} -->", f"<!-- end of {name} -->", f"\n\n{made}\n\n", page
            )
            page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
