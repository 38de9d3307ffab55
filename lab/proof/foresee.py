"""What plan says of every entry before it is run, and the two sides of every line.

    python -m lab.proof.foresee RESULTS [--second | --stored]

Reads entries.json. An entry of the kind `edge` becomes two runs: the nearest value of its knob at which plan is sure that the
server starts, and the nearest at which it is sure that it does not; what lies between is plan's own error band. Writes
RESULTS/foreseen.json (plan's answers) and RESULTS/runs.json (what `lab.gpu.provoke_failures --runs` plays on a GPU host).

`--second` takes the entries that were drawn up after the first runs, to check what was corrected by them: their answers are
added to those in foreseen.json, and runs.json has them alone. `--stored` asks nothing anew: runs.json then has the very runs of
RESULTS/foreseen.json, at the points that plan named then; a plan that was corrected since may name others.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.gpu.models import config_of
from plimsoll.cli.main import parse
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import MemoryPlan, plan_command

ENTRIES = Path(__file__).with_name("entries.json")
GPU, RELEASE = "H200", "0.25.1"
TOTAL_MIB = 143155  # of the card as vLLM sees it: 150,109,880,320 bytes
CONTEXT_MIB = TOTAL_MIB - 142629  # what a process holds on the card before it allocates anything
PLAYED = ("name", "model", "args", "env", "ballast", "then", "limit")  # what the player understands
TOLD = ("name", "kind", "half", "model", "args", "env", "ballast", "edge", "expect")
Entry = dict[str, Any]


def answer(entry: Entry, models: Path) -> MemoryPlan:
    """Plan's answer to one run, by the way the command takes."""
    words = ["--gpu", GPU, "--vllm", RELEASE, *_neighbour(entry), "--", *command(entry, str(models / entry["model"]))]
    options = parse(ServerOptions, words)
    return plan_command(options)


def command(entry: Entry, model: str) -> list[str]:
    """The launch as a user would type it."""
    variables = [f"{name}={value}" for name, value in entry.get("env", {}).items() if name != "VLLM_LOGGING_LEVEL"]
    return [*(["env", *variables] if variables else []), "vllm", "serve", model, *entry["args"]]


def _neighbour(entry: Entry) -> list[str]:
    for words in entry.get("ballast", ()):
        verb, _, amount = words.partition(" ")
        used = TOTAL_MIB - int(amount) if verb == "leave" else int(amount) + CONTEXT_MIB
        return ["--used-gib", f"{used / 1024:.4f}"]
    return []


def side(ledger: Ledger, line: str) -> int:
    """On which side of a line this start is: 1 surely inside, -1 surely outside, 0 within plan's own band."""
    need = ledger.kv_plan.bytes_for_one_request
    if line == "context":
        return _sign(inside=ledger.kv.low >= need, outside=ledger.kv.high < need)
    if line == "cache":
        return _sign(inside=ledger.kv.low >= need, outside=ledger.kv.high <= 0)
    if line in ("free", "fixed"):
        return _sign(inside=ledger.slack.low >= 0, outside=ledger.slack.high < 0)
    if line == "graphs":
        aside = ledger.graphs.value
        most, least = max(0, ledger.graphs_actual.high - aside), max(0, ledger.graphs_actual.low - aside)
        return _sign(inside=ledger.slack.low >= most, outside=ledger.slack.high < least)
    assert line == "profile", line
    spent = (ledger.weights, ledger.non_torch, ledger.activation)
    room = ledger.card.total_bytes - ledger.card.used_bytes
    low, high = sum(term.low for term in spent), sum(term.high for term in spent)
    return _sign(inside=high + ledger.context.high <= room, outside=low + ledger.context.low > room)


def _sign(*, inside: bool, outside: bool) -> int:
    return 1 if inside else -1 if outside else 0


def last_before(good: Callable[[int], bool], start: int, end: int) -> int:
    """The last number from `start` towards `end` for which `good` holds, which it does at `start` and not at `end`."""
    assert good(start), f"plan is not sure at {start}"
    assert not good(end), f"plan is still sure at {end}"
    while abs(end - start) > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if good(middle) else (start, middle)
    return start


# The knobs, by where the grid ends on the inside and on the outside.
GRIDS = {
    ("--kv-cache-memory-bytes", "context"): (200_000, 1),
    ("--gpu-memory-utilization", "context"): (9200, 200),
    ("--gpu-memory-utilization", "cache"): (9200, 200),
    ("leave", "free"): (TOTAL_MIB // 32, 600),
    ("--kv-cache-memory-bytes", "fixed"): (64, 12_000),
    ("--kv-cache-memory-bytes", "graphs"): (64, 12_000),
    ("--max-num-batched-tokens", "profile"): (4, 256),
}


def both_sides(entry: Entry, models: Path) -> list[Entry]:
    """The two runs of an edge."""
    knob, step, line = (entry["edge"][key] for key in ("knob", "step", "line"))
    if step == "block":
        step = answer(_turned(entry, knob, 1 << 34), models).ledger.kv_plan.bytes_per_block

    def at(number: int) -> Entry:
        return _turned(entry, knob, round(number * step, 4))  # a utilisation has four decimals, all others are whole

    def where(number: int) -> int:
        return side(answer(at(number), models).ledger, line)

    inner, outer = GRIDS[(knob, line)]
    inside = last_before(lambda number: where(number) == 1, inner, outer)
    outside = last_before(lambda number: where(number) == -1, outer, inner)
    return [
        at(inside) | {"name": f"{entry['name']}-inside", "expect": entry.get("inside")},
        at(outside) | {"name": f"{entry['name']}-outside"},
    ]


def _turned(entry: Entry, knob: str, value: float) -> Entry:
    if knob == "leave":
        return entry | {"ballast": [f"leave {value}"]}
    return entry | {"args": [*entry["args"], knob, str(value)]}


def prediction(planned: MemoryPlan) -> Entry:
    """What is kept of an answer: sizes in bytes, codes by severity."""
    ledger = planned.ledger
    terms = ("requested", "weights", "non_torch", "activation", "graphs", "graphs_actual", "context", "kv", "slack")
    return {
        "fits": planned.fits,
        "findings": [[str(finding.code), str(finding.severity)] for finding in planned.findings],
        "terms": {term: [size.value, size.low, size.high] for term in terms for size in [getattr(ledger, term)]},
        "blocks": ledger.kv_plan.num_blocks,
        "bytes_per_block": ledger.kv_plan.bytes_per_block,
        "tokens": ledger.kv_plan.tokens,
        "need": ledger.kv_plan.bytes_for_one_request,
    }


def runs_of(entries: list[Entry], models: Path) -> list[Entry]:
    """Every run of every entry, edges opened."""
    return [run for entry in entries for run in (both_sides(entry, models) if entry["kind"] == "edge" else [entry])]


def write_models(models: dict[str, Entry], folder: Path) -> None:
    """A folder with config.json for every model, as plan wants it."""
    for name in models:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config_of(models, name)), encoding="utf-8")


def as_stored(told: Entry, foreseen: list[Entry]) -> list[Entry]:
    """The runs whose answers are kept, with what their entries say is done once the server is up."""
    entries = {entry["name"]: entry for entry in (*told["entries"], *told["second"])}
    return [entries[re.sub("-(inside|outside)$", "", row["name"])] | row for row in foreseen]


def main(arguments: list[str]) -> int:
    """Write what is foreseen, before anything is run."""
    is_second = "--second" in arguments
    results = Path(next(word for word in arguments if not word.startswith("--")))
    results.mkdir(parents=True, exist_ok=True)
    told = json.loads(ENTRIES.read_text(encoding="utf-8"))
    if "--stored" in arguments:
        runs = as_stored(told, json.loads((results / "foreseen.json").read_text(encoding="utf-8")))
        _write(results, "runs", {"models": told["models"], "runs": [_played(run) for run in runs]})
        print(f"{len(runs)} runs as they were made")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        write_models(told["models"], models)
        runs = runs_of(told["second" if is_second else "entries"], models)
        foreseen = [{key: run[key] for key in TOLD if key in run} | {"plan": prediction(answer(run, models))} for run in runs]
    new = {row["name"] for row in foreseen}
    before = json.loads((results / "foreseen.json").read_text(encoding="utf-8")) if is_second else []
    kept = [row for row in before if row["name"] not in new]
    _write(results, "foreseen", [*kept, *foreseen])
    _write(results, "runs", {"models": told["models"], "runs": [_played(run) for run in runs]})
    for row in foreseen:
        print(f"{row['name']:36} fits {row['plan']['fits']!s:5} {row['plan']['findings']} {' '.join(row['args'][-2:])}")
    return 0


def _played(run: Entry) -> Entry:
    return {key: run[key] for key in PLAYED if key in run} | {"expect": run["expect"], "see": ["."]}


def _write(results: Path, name: str, value: object) -> None:
    (results / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
