"""What was measured of plimsoll.inside on a GPU, and how."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lab.gpu import measure_inside
from lab.gpu.inside_bench import ON_CPU, Bench, Kept
from lab.gpu.inside_compact import WINDOW_S, compact_result, control_starts
from lab.gpu.inside_figures import agreement, compare
from lab.gpu.inside_server import MIB, read_apps, read_gpu
from lab.paired import loss_of
from lab.streams import Answer
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


GPU = "memory.used [MiB], memory.total [MiB]\n80000 MiB, 143771 MiB\n"
APPS = "pid, used_gpu_memory [MiB]\n4711, 70000 MiB\n815, 9000 MiB\n99, [N/A]\n"


def worker(**memory: int | None) -> dict[str, Any]:
    """The figures of a worker with this of the device."""
    usual = {"used": 80_000 * MIB, "total": 143_771 * MIB, "by_this_process": 70_000 * MIB, "by_others": 10_000 * MIB}
    return {"pid": 4711, "device_memory": usual | memory}


def test_nvidia_smi_is_read_and_compared_in_percent() -> None:
    """MiB become bytes; a process that it does not list leaves its share unknown, and the agreement counts it."""
    assert read_gpu(GPU) == {"used": 80_000 * MIB, "total": 143_771 * MIB}
    assert read_apps(APPS) == {4711: 70_000 * MIB, 815: 9_000 * MIB}
    assert read_gpu("No devices were found\n") is None
    assert read_apps("") == {}

    off = compare({"gpu": GPU, "apps": APPS}, worker(used=80_800 * MIB))
    assert off == {"used": 1.0, "total": 0.0, "by_this_process": 0.0, "by_others": 0.0, "by_others_listed": 1.25}
    off = compare({"gpu": GPU, "apps": "pid, used_gpu_memory [MiB]\n"}, worker(by_this_process=None, by_others=None))
    assert (off["used"], off["by_this_process"], off["by_others"]) == (0.0, None, None)
    rows = [compare({"gpu": GPU, "apps": APPS}, worker(used=used * MIB)) for used in (80_000, 80_080)]
    rows.append(compare({"gpu": "", "apps": ""}, worker()))
    found = agreement([{"off_percent": row} for row in rows])
    assert found["used"] == {"pairs": 2, "unknown": 1, "max_percent": 0.1, "mean_percent": 0.05}


@pytest.mark.parametrize(
    ("gpu", "apps", "ours"),
    [("", "", worker()), (GPU, APPS, {"pid": 4711, "device_memory": None}), (GPU, APPS, {})],
)
def test_what_one_side_does_not_know_is_not_compared(gpu: str, apps: str, ours: dict[str, Any]) -> None:
    """Neither a machine without nvidia-smi nor a worker without a device agrees by accident."""
    assert set(compare({"gpu": gpu, "apps": apps}, ours).values()) == {None}


def test_the_control_stays_out_of_the_time_of_the_compactions() -> None:
    """Every window lies whole in the time before or after, and both have some."""
    marks = [0.0, 20.0, 50.0, 90.0]
    starts = control_starts(marks, 300)
    assert all(0 <= at <= 20 - WINDOW_S or 50 <= at <= 90 - WINDOW_S for at in starts)
    assert any(at < 20 for at in starts)
    assert 1.5 < sum(at > 50 for at in starts) / sum(at < 20 for at in starts) < 3
    assert control_starts([0.0, 1.0, 9.0, 10.0], 5) == []


def test_a_stall_at_a_compaction_is_seen_against_the_control() -> None:
    """A stream with a piece every 10 ms, but for half a second at the compaction at 15 s."""
    pieces = [at / 100 for at in range(3000) if not 1500 < at < 1550]
    done = [{"asked": 15.0, "answered_after_s": 0.02, "returned": 512 * MIB, "duration_s": 0.006,
             "smi_before_mib": 900, "smi_after_mib": 500}]  # fmt: skip
    found = compact_result([Answer(0.0, tuple(pieces), len(pieces), None)], done, [0.0, 10.0, 20.0, 30.0])
    assert found["longest_gap_with_ms"]["max"] == pytest.approx(500)
    assert found["longest_gap_without_ms"]["max"] == pytest.approx(10, abs=0.1)
    assert found["returned_mib"]["median"] == 512
    assert found["duration_ms"]["max"] == 6
    assert found["smi_returned_mib"]["mean"] == 400
    assert found["failed"] == 0
    assert found["with"]["gap_max_ms"] == pytest.approx(500)


def bench_at(folder: Path) -> Bench:
    """A bench that starts nothing."""
    return Bench(folder, folder, folder, ON_CPU)


def test_a_stage_that_fails_or_takes_too_long_leaves_what_it_had(tmp_path: Path) -> None:
    """What was found before the fault is on the disk, with the fault beside it; a sleep of 30 s is cut off."""

    def stage(bench: Bench, kept: Kept) -> None:
        kept.add("rows", str(bench.scale.model_name))
        raise ValueError("as it happens")

    measure_inside.play("figures", stage, 5.0, bench_at(tmp_path))
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept["rows"] == ["tiny"]
    assert "as it happens" in kept["wrong"]

    def slow(_bench: Bench, _kept: Kept) -> None:
        time.sleep(30)

    began = time.monotonic()
    result = measure_inside.play("figures", slow, 0.2, bench_at(tmp_path))
    assert time.monotonic() - began < 5
    assert "OutOfTime" in result["wrong"]
