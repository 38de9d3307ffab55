"""Runs every benchmark, or those named: `python -m benchmarks [startup redaction]`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("startup", "planning", "plan_accuracy", "weights_accuracy", "redaction", "simulate_h200", "simulate_speed",
              "tune_h200", "tune_short", "doctor_accuracy", "doctor_speed", "inside_import", "inside_gate", "standin",
              "guard_scale", "guard_sharp", "guard_quiet")  # fmt: skip

asked = sys.argv[1:] or BENCHMARKS
for name in asked:
    if name not in BENCHMARKS:
        raise SystemExit(f"there is no benchmark {name!r}; there is: {', '.join(BENCHMARKS)}")
for name in asked:
    print(f"== {name}", flush=True)
    sys.argv[1:] = []  # the names were for us
    if importlib.import_module(f"benchmarks.{name}").main():
        raise SystemExit(f"{name}: not as promised")
