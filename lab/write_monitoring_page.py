"""Writes the lists of docs/monitoring.md from the alerts themselves.

python -m lab.write_monitoring_page            write them
python -m lab.write_monitoring_page --check    exit 1 if they are not what the alerts are now
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

from lab.marked import placed
from plimsoll.assets.alerts import Alert, groups_of
from plimsoll.assets.monitoring import alerts_of
from plimsoll.assets.names import span
from plimsoll.assets.settings import AssetSettings
from plimsoll.vllm.versions import newest

PAGE = Path(__file__).parents[1] / "docs" / "monitoring.md"
WIDTH = 138
PARTS = ("pages", "tickets", "conditional")
CONDITIONAL = {
    "plimsoll_torch_": "a GPU, and the probe",
    "plimsoll_device_": "a GPU whose driver answers, and the probe",
    "plimsoll_worker_resident_bytes": "the probe",
    "plimsoll_refused_total": "once the gate has refused a request",
    "plimsoll_guard_trouble": "while guard has trouble of its own",
    "plimsoll_guard_actions_total": "guard with --act",
    "plimsoll_guard_look_failures_total": "once a look has brought nothing",
    "plimsoll_guard_": "guard",
    "plimsoll_armed": "guard",
    "plimsoll_": "the gate",
    "process_": "one API server: with several, vLLM shows no metrics of a process",
    "http_requests_total": "once a request of that outcome was answered",
    "ALERTS": "while an alert is pending or fires",
}
"""What is not on every page, by the beginning of its name, and what it takes; the first that fits counts."""


def described(alert: Alert) -> str:
    """One alert, for the person it woke up."""
    fires = next(case for case in alert.cases if case.fires)
    quiet = [case.about for case in alert.cases if not case.fires]
    finding = f"[{alert.code}](findings/{alert.code}.md)" if alert.code else "none: it is about the watching itself"
    return "\n".join(
        [
            f"### {alert.name}", "", fill(alert.means, WIDTH, break_on_hyphens=False), "",
            f"- fires after {span(alert.for_s)}" if alert.for_s else "- fires at once",
            f"- page to read: {finding}",
            f"- needs: {alert.needs}",
            f"- tested to fire: {fires.about}",
            fill(f"- tested to be silent: {'; '.join(quiet)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False),
            "", "```promql", alert.expr, "```", "",
        ]
    )  # fmt: skip


def part(name: str) -> str:
    """One generated list."""
    if name == "conditional":
        rows = [f"| `{start}{'...' if start.endswith('_') else ''}` | {needs} |" for start, needs in CONDITIONAL.items()]
        return "\n".join(["| metric | is there with |", "|---|---|", *rows])
    found = [alert for alert in alerts_of(groups_of(AssetSettings(newest()))) if alert.severity == name.removesuffix("s")]
    return "\n".join(described(alert) for alert in found).rstrip()


def written(text: str) -> str:
    """The page with its lists as they are now."""
    for name in PARTS:
        begin, end = f"<!-- {name}: made by `python -m lab.write_monitoring_page` -->", f"<!-- end of {name} -->"
        text = placed(text, begin, end, f"\n{part(name)}\n", PAGE)
    return text


def main(words: list[str]) -> int:
    """Write it, or say whether it would be written otherwise."""
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if "--check" in words:
        if before != after:
            print(f"{PAGE.name} is old: python -m lab.write_monitoring_page writes it")
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
