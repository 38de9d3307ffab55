"""What was measured of plimsoll.inside on a GPU; the list of provoked failures, and the shortening of what they print."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from lab.catalogue.log_lines import log_line
from lab.gpu.inside_server import MIB
from lab.gpu.snapshot_extension import without_machine_paths
from lab.gpu.trim_log import trim
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
        wanted = {"used": used, "total": total, "by_this_process": own, "by_others": used - own}
        distances = [ours[name] - size for name, size in wanted.items()]
        worst = max(worst, *(abs(distance) / used for distance in distances))
    assert worst < 0.0001  # a hundredth of what was asked for


def test_what_compaction_gave_back() -> None:
    """Under 64 streams nobody failed; what is called releasable is what was given back; it matters beside a neighbour."""
    found = recorded("compact")
    assert (found["result"]["failed"], found["shape"]["clients"]) == (0, 64)
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


def test_the_overhead_stays_below_its_bound_and_the_page_has_the_metrics_of_today() -> None:
    """Five pairs, reckoned again from every run; what doctor reads is on the page, and none that we no longer have."""
    found = recorded("overhead")
    rates: dict[int, dict[str, float]] = {}
    for run in found["runs"]:
        rates.setdefault(run["pair"], {})[run["server"]] = run["tokens_per_s"]
    loss = loss_of([(pair["with"], pair["without"]) for pair in rates.values()])
    assert len(loss.ratios) == 5
    assert loss.upper is not None
    assert loss.upper < 0.03
    assert abs(loss.upper - found["result"]["upper"]) < 1e-9
    page = (HOME / "metrics.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"^(plimsoll_\w+?)(?:_total|_created)?(?:\{.*\})? ", page, re.MULTILINE))
    assert named <= {meter.name for meter in METERS}
    for name in EXTERNAL_METRICS:
        assert not name.startswith("plimsoll_") or f"\n{name}{{" in page


OOM = (
    "(EngineCore pid=77) ERROR [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.91 GiB."
    " GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is free. Process 4711 has 20.51 GiB memory in use."
)


def test_trimming_keeps_the_cause_and_drops_the_bulk_and_the_machine() -> None:
    """Errors word for word; dumps lose their middle, folders, host names and addresses are gone."""
    assert trim(OOM) == OOM
    assert re.search(log_line("torch-process").pattern, trim(OOM))
    dump = "(EngineCore pid=7) ERROR Dumping input data for V1 LLM engine " + "x" * 50_000 + " end"
    short = trim(dump)
    assert len(short) < 2000
    assert short.startswith("(EngineCore pid=7) ERROR Dumping input data")
    assert short.endswith(" end")
    assert trim("(EngineCore pid=7) Capturing:  0%\rCapturing: 50%\rCapturing: 100%") == "(EngineCore pid=7) Capturing: 100%"
    asked = '(APIServer pid=1) INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK'
    assert trim("\n".join([asked] * 9)).count("/metrics") == 3
    line = "at /srv/lab/site/vllm/x.py on box-17 tcp://10.4.5.6:4000 http://127.0.0.1:8123 /scratch/w/models/m"
    assert trim(line, "box-17", (("/scratch/w", ""),)) == (
        "at /opt/vllm/x.py on host tcp://192.0.2.1:4000 http://127.0.0.1:8123 /models/m"
    )
    frame = {"filename": "/home/me/site/vllm/v1/worker/gpu_worker.py", "line": 3, "name": "load_model"}
    without_machine_paths({"segments": [{"blocks": [{"frames": [frame]}]}], "device_traces": [[{"frames": [frame]}]]})
    assert frame["filename"] == "vllm/v1/worker/gpu_worker.py"


FAILURES = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"


def test_every_kept_recording_is_small_labelled_and_without_this_machine() -> None:
    """Each file has one label, stays below the limit, and its tracebacks name no folder of the machine and no plugin."""
    labels = json.loads((FAILURES / "labels.json").read_text(encoding="utf-8"))
    files = [name for label in labels for name in label["files"]]
    assert sorted(files) == sorted(path.name for path in FAILURES.iterdir() if path.name != "labels.json")
    for name in files:
        data = (FAILURES / name).read_bytes()
        text = gzip.decompress(data) if name.endswith(".gz") else data
        assert len(text) < 70_000, name
        assert b"oom_anywhere.py" not in text, name
        places = {place.decode() for place in re.findall(rb'File "(/[^/"]*/[^/"]*)', text)}
        assert places <= {"/opt/vllm", "/usr/lib"}, name
