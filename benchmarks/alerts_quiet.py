"""How quiet the alerts are: days of healthy traffic of ten kinds, asked by the real promtool as Prometheus would.

    python -m benchmarks.alerts_quiet [--days 10] [--seed 1]

The traffic is that of guard_quiet: one engine and one kind of day after the other, a look every 15 s, two in a thousand of them
lost. Prints for how many minutes each alert fired. Two that page may be right: the only engine is away for a deploy of up to 25
minutes, and a kind with twelve restarts a day has three of them within half an hour now and then. Exit 1 if any other paged.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from lab.guard.weeks import KINDS, engine_for, week
from lab.record_shapes import series_of
from plimsoll.assets.alerts import groups_of
from plimsoll.assets.monitoring import alerts_of, rules_text
from plimsoll.assets.names import Names
from plimsoll.assets.rendering import quoted
from plimsoll.assets.settings import AssetSettings

SETTINGS = AssetSettings("0.32.0")
EVALUATED_S = 30
MAY_BE_RIGHT = {"VllmEngineDown", "VllmRestartLoop"}
SAID = re.compile(r'alertname="(\w+)"[^}]*\}\s+([\d.Ee+]+)')
ASKED = 'sum by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1d]))'


def fired(folder: Path, number: int, seed: int) -> tuple[str, Counter[str]]:
    """One day: its kind, and for how many minutes each alert fired."""
    kind = KINDS[number % len(KINDS)]
    names = Names(SETTINGS)
    looks = week(kind, engine_for(kind, number), seed * 100_003 + number, 1, 3)
    series = {name: values for figure, values in series_of(looks).items() if (name := names.series(figure, names.here()))}
    (folder / "rules.yml").write_text(rules_text(groups_of(SETTINGS), SETTINGS.job), encoding="utf-8")
    rows = [f"      - series: {quoted(name)}\n        values: {quoted(values)}" for name, values in series.items()]
    head = f"rule_files: [rules.yml]\nevaluation_interval: {EVALUATED_S}s\ntests:\n  - interval: 15s\n    input_series:\n"
    tail = f"\n    promql_expr_test:\n      - {{expr: {quoted(ASKED)}, eval_time: 23h59m, exp_samples: []}}\n"
    (folder / "day.yml").write_text(head + "\n".join(rows) + tail, encoding="utf-8")
    promtool = shutil.which("promtool") or "promtool"
    done = subprocess.run([promtool, "test", "rules", "day.yml"], cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in said, said
    return kind.name, Counter({name: round(float(count) * EVALUATED_S / 60) for name, count in SAID.findall(said)})


def main() -> int:
    """Run them and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began_s, total = time.monotonic(), Counter[str]()
    pages = {alert.name for alert in alerts_of(groups_of(SETTINGS)) if alert.severity == "page"}
    for number in range(options.days):
        with tempfile.TemporaryDirectory() as folder:
            kind, minutes = fired(Path(folder), number, options.seed)
        total += minutes
        print(
            f"{kind:<16} {', '.join(f'{name} {count} min' for name, count in sorted(minutes.items())) or 'silent'}", flush=True
        )
    woken = {name: count for name, count in total.items() if name in pages}
    print(f"{options.days} engine-days, {time.monotonic() - began_s:.0f} s; minutes of pages: {woken or 'none'}")
    return 1 if set(woken) - MAY_BE_RIGHT else 0


if __name__ == "__main__":
    raise SystemExit(main())
