"""Runs every benchmark, or those named: `python -m benchmarks [startup redaction]`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("startup", "planning", "plan_accuracy", "weights_accuracy", "redaction", "simulate_h200", "simulate_speed",
              "doctor_accuracy", "doctor_speed", "inside_import", "inside_gate", "standin")  # fmt: skip

for name in sys.argv[1:] or BENCHMARKS:
    if name not in BENCHMARKS:
        raise SystemExit(f"there is no benchmark {name!r}; there is: {', '.join(BENCHMARKS)}")
    print(f"== {name}")
    importlib.import_module(f"benchmarks.{name}").main()
