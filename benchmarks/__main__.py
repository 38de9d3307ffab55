"""Runs the benchmarks that need no more than this repository, or those named: `python -m benchmarks [startup redaction]`.

Left out, each run by its own name (`python -m benchmarks.NAME`): alerts_quiet needs promtool, inside_overhead the real engine,
simulate_accuracy and tune_grid recordings and traces that are not in the repository.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("startup", "planning", "coverage", "plan_accuracy", "weights_accuracy", "redaction", "simulate_h200",
              "simulate_speed", "tune_h200", "tune_short", "doctor_accuracy", "doctor_speed", "inside_import",
              "inside_gate", "survive_step", "standin", "guard_scale", "guard_sharp", "guard_quiet")  # fmt: skip

asked = sys.argv[1:] or BENCHMARKS
for name in asked:
    if name not in BENCHMARKS:
        raise SystemExit(f"there is no benchmark {name!r}; there is: {', '.join(BENCHMARKS)}")
for name in asked:
    print(f"== {name}", flush=True)
    sys.argv[1:] = []  # the names were for us
    if importlib.import_module(f"benchmarks.{name}").main():
        raise SystemExit(f"{name}: not as promised")
