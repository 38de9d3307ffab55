"""Whether tune keeps its word: the number of servers and the rate that it promises, replayed at that rate and at a tenth more.

    python -m benchmarks.tune_verdict --traces DIR

Three traces, four cards (one also with two engines a server), one promise each. A verdict holds if the fleet keeps the promise
at the promised rate, if one server less breaks it for the traffic as it is, and if a tenth more than the promised rate breaks
it (the rate is found within 3 %).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plimsoll.cli.main import parse
from plimsoll.cli.tune import TuneOptions, tune_one
from plimsoll.tune.capacity import replay_fleet
from plimsoll.tune.goodput import Traffic

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SERVERS = (("L4", ""), ("L40S", ""), ("L40S", "--data-parallel-size 2"), ("H100", ""), ("H200", ""))
TRACES = (
    ("AzureLLMInferenceTrace_conv.csv.gz", "--limit 1500 --speedup 2", "ttft=2s,tpot=150ms"),
    ("AzureLLMInferenceTrace_code.csv.gz", "--limit 1000 --speedup 3", "ttft=3s,tpot=200ms"),
    ("mooncake_synthetic_trace.jsonl.gz", "--limit 400 --speedup 0.5", "ttft=20s,tpot=200ms"),
)
KEEP = "99"
MORE = 1.1


def main() -> None:
    """Print the table; fail if a verdict does not hold."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--traces", required=True, type=Path)
    folder = reader.parse_args().traces
    print("| traffic | card | servers | up to, requests/s | one server less | at that rate | at 1.1 times | holds |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    wrong = 0
    for name, words, slo in TRACES:
        for card, flags in SERVERS:
            typed = f"{folder / name} {words} --slo {slo} --keep {KEEP} --gpu {card}".split()
            limit = "131072" if name.startswith("mooncake") else "16384"
            options = parse(TuneOptions, [*typed, "--", "vllm", "serve", MODEL, "--max-model-len", limit, *flags.split()])
            server = f"{card}, {flags.rpartition(' ')[2]} engines" if flags else card
            report = tune_one(options)
            capacity, found = report.capacity, report.tuning.found
            if capacity is None or found is None or capacity.servers is None or capacity.highest is None:
                print(f"| {name.partition('.')[0]} | {server} | none keeps it | - | - | - | - | - |", flush=True)
                continue
            traffic = Traffic(report.tuning.traffic.trace, options.speedup, report.tuning.traffic.slo)
            job = report.tuning.server.job_of(found.best.option)
            rate = capacity.highest.speedup
            less = replay_fleet(traffic, job, capacity.servers - 1) if capacity.servers > 1 else None
            now, more = (replay_fleet(traffic, job, capacity.servers, rate * factor) for factor in (1.0, MORE))
            holds = now.share >= capacity.keep and (less is None or less.share < capacity.keep)
            holds = holds and (not capacity.is_bounded or more.share < capacity.keep)
            wrong += not holds
            shown = [f"{one.met:,} of {one.requests:,}" if one is not None else "-" for one in (less, now, more)]
            than = f"{capacity.highest.requests_per_second:.3g}" + ("" if capacity.is_bounded else " at least")
            cells = [name.partition(".")[0], server, str(capacity.servers), than, *shown, "yes" if holds else "NO"]
            print(f"| {' | '.join(cells)} |", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
