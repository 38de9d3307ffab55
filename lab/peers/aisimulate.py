"""AISimulate on every recorded run that it knows the card and the flags of: lab/results/aisimulate.json.

    python -m venv ENV && ENV/bin/pip install aisimulate==0.13.0.dev202610270000000085
    python -m lab.peers.aisimulate ENV/bin/aisimulate [--runs FOLDER]

It is given what the replay is given: arrivals, lengths, shared beginnings, blocks and limits, and no fit. It does not know
`--enforce-eager`, nor an RTX 4090; of data-parallel engines it is given the share of one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.clock import PEER, PRO, Case, Outcome, cases
from benchmarks.simulate_accuracy import RUNS
from plimsoll.simulate.trace import ABSENT, Trace

VERSION = "0.13.0.dev202610270000000085"
HARDWARE = {"H200": "h200_sxm", PRO: "rtx_pro_6000_server"}
MODELS = {"Qwen3-32B": "Qwen/Qwen3-32B", "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B"}
LLAMA = "meta-llama/Meta-Llama-3.1-8B"


def trace_lines(trace: Trace) -> list[str]:
    """Mooncake's format; a request without ids gets ids of its own."""
    lines, fresh = [], 1 << 40
    for number in range(trace.size):
        needed = -(-int(trace.prompt[number]) // trace.prefix_block)
        ids = trace.ids_of(number)[:needed].tolist()
        ids += range(fresh, fresh + needed - len(ids))
        fresh += needed
        row = {"timestamp": float(trace.arrival_ns[number]) / 1e6, "input_length": int(trace.prompt[number]),
               "output_length": int(trace.output[number]), "hash_ids": ids}  # fmt: skip
        lines.append(json.dumps(row))
    return lines


def settings_of(case: Case, trace: Path) -> dict[str, Any]:
    """The prediction's configuration."""
    limits, launch = case.limits, case.command.settings
    model = next((full for part, full in MODELS.items() if part in case.name), LLAMA)
    worker: dict[str, Any] = {
        "scheduler": {"max_batched_tokens": limits.max_num_batched_tokens, "max_sequences": limits.max_num_seqs},
        "kv_cache": {"block_size": limits.block_size, "capacity": {"type": "fixed", "blocks": limits.num_blocks - 1}},
    }
    if launch.tensor_parallel > 1:
        worker["parallelism"] = {"tensor": launch.tensor_parallel}
    source = {"type": "trace", "paths": [str(trace)], "format": "mooncake", "block_size": case.run.trace.prefix_block}
    return {
        "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        "engine": {
            "mode": "aggregated",
            "model": model,
            "hardware": HARDWARE[case.card],
            "backend": "vllm",
            "context_length": min(limits.max_model_len, 131_072),
            "workers": {"aggregated": worker},
        },
    }


def errors_of(case: Case, report: dict[str, Any]) -> Outcome:
    """Its means over those of the run."""
    run, output = case.run, case.run.trace.output
    first = (run.first_token_ns - run.trace.arrival_ns)[run.first_token_ns != ABSENT]
    several = (run.finish_ns != ABSENT) & (run.first_token_ns != ABSENT) & (output > 1)
    further = ((run.finish_ns - run.first_token_ns) / np.maximum(1, output - 1))[several]
    return Outcome(
        report["duration_ms"] / (float(run.finish_ns.max()) / 1e6) - 1,
        report["mean_ttft_ms"] / (float(first.mean()) / 1e6) - 1,
        report["mean_tpot_ms"] / (float(further.mean()) / 1e6) - 1,
    )


def predicted(program: str, case: Case, place: Path) -> dict[str, Any]:
    """What it prints of one run."""
    trace, config = place / "trace.jsonl", place / "config.yaml"
    trace.write_text("\n".join(trace_lines(case.run.trace)) + "\n", encoding="utf-8")
    config.write_text(yaml.safe_dump(settings_of(case, trace)), encoding="utf-8")
    words = [program, "predict", "-c", str(config), "--output-dir", str(place / "out"), "--overwrite", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise ValueError(done.stderr.strip()[-300:])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main(argv: Sequence[str]) -> None:
    """Predict every run, print what it said, and keep the errors."""
    parser = argparse.ArgumentParser(prog="python -m lab.peers.aisimulate")
    parser.add_argument("program", help="the installed aisimulate")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the folder of the runs on RTX cards")
    asked = parser.parse_args(argv)
    errors: dict[str, list[float]] = {}
    for case in cases(asked.runs):
        launch = case.command.settings
        if case.card not in HARDWARE or launch.enforce_eager or launch.data_parallel > 1:
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                found = errors_of(case, predicted(asked.program, case, Path(place)))
            except ValueError as problem:
                print(f"{case.name}: {problem}")
                continue
        errors[case.name] = [round(error, 4) for error in found]
        print(case.name, ", ".join(f"{error:+.1%}" for error in found), flush=True)
    PEER.write_text(json.dumps({"aisimulate": VERSION, "errors": errors}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
