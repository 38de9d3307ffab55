"""What was measured of plimsoll.inside on a GPU, and how."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lab.gpu.inside_server import MIB
from lab.paired import loss_of
from plimsoll.doctor.rules.trend_growth import EXTERNAL_METRICS
from plimsoll.inside.meters import METERS

HOME = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-inside"


def recorded(name: str) -> Any:
    return json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))


def test_our_figures_agree_with_nvidia_smi_within_one_percent() -> None:
    """26 pairs, taken within a second of each other: used, total, ours and others', reckoned again from what was printed."""
    pairs = recorded("figures")["pairs"]
    assert len(pairs) == 26
    worst = 0.0
    for pair in pairs:
        used, total = (int(number) * MIB for number in re.findall(r"(\d+) MiB", pair["smi"]["gpu"]))
        ours = pair["ours"]["device_memory"]
        listed = {int(pid): int(size) * MIB for pid, size in re.findall(r"(\d+), (\d+) MiB", pair["smi"]["apps"])}
        own = listed[pair["ours"]["pid"]]
        distances = (
            ours["used"] - used,
            ours["total"] - total,
            ours["by_this_process"] - own,
            ours["by_others"] - (used - own),
        )
        worst = max(worst, *(abs(distance) / used for distance in distances))
    assert worst < 0.0001  # a hundredth of what was asked for


def test_what_compaction_gave_back() -> None:
    """Under 64 streams nobody failed; what is called releasable is what was given back; it matters beside a neighbour."""
    found = recorded("compact")
    assert found["result"]["failed"] == 0
    assert found["shape"]["clients"] == 64
    done = [compaction["said"]["workers"][0] for compaction in found["compactions"]]
    assert len(done) == 20
    assert all(each["returned"] == each["reserved_before"] - each["reserved_after"] for each in done)
    assert all(each["free_after"] - each["free_before"] == each["returned"] for each in done)
    assert min(each["returned"] for each in done) > 700 * MIB

    steps = {step["step"]: step for step in recorded("neighbour")["steps"]}
    before = steps["ask without compaction"]["counters"]["releasable"]
    assert before == steps["compact"]["did"]["returned"] == 3_061_841_920

    found = recorded("neighbour")
    assert found["failed_without"]
    assert found["succeeded_with"]
    assert (found["short_failed"], found["long_failed_after"]) == (0, 0)
    assert found["long_failed_beside"] > 0
    assert any("OutOfMemoryError" in line for line in found["log_says"])
    ratios = [*recorded("neighbour")["alone"]["ratios"], *recorded("alone")["alone"]["ratios"]]
    assert len(ratios) == 11
    assert min(ratios) < 1 < max(ratios)
    assert recorded("alone")["alone"]["failed"] == 0


def test_the_overhead_stays_below_its_bound() -> None:
    """Five pairs, reckoned again from every run."""
    found = recorded("overhead")
    rates: dict[int, dict[str, float]] = {}
    for run in found["runs"]:
        rates.setdefault(run["pair"], {})[run["server"]] = run["tokens_per_s"]
    loss = loss_of([(pair["with"], pair["without"]) for pair in rates.values()])
    assert len(loss.ratios) == 5
    assert loss.upper is not None
    assert loss.upper < 0.03
    assert abs(loss.upper - found["result"]["upper"]) < 1e-9


def test_the_page_recorded_there_has_the_metrics_of_today() -> None:
    """Names that the doctor reads are on it; none is on it that we no longer have."""
    page = (HOME / "metrics.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"^(plimsoll_\w+?)(?:_total|_created)?(?:\{.*\})? ", page, re.MULTILINE))
    assert named <= {meter.name for meter in METERS}
    for name in EXTERNAL_METRICS:
        assert not name.startswith("plimsoll_") or f"\n{name}{{" in page
