"""The list of provoked failures, their recording, and the shortening of what they print, without a GPU."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from lab.catalogue.log_lines import log_line
from lab.gpu.snapshot_extension import without_machine_paths
from lab.gpu.trim_log import trim

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
    snapshot = {"segments": [{"blocks": [{"frames": [frame]}]}], "device_traces": [[{"frames": [frame]}]]}
    without_machine_paths(snapshot)
    assert frame["filename"] == "vllm/v1/worker/gpu_worker.py"


CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"


def test_every_kept_recording_is_small_labelled_and_without_this_machine() -> None:
    """Each file has one label, stays below the limit, and its tracebacks name no folder of the machine and no plugin."""
    labels = json.loads((CAPTURES / "labels.json").read_text(encoding="utf-8"))
    files = [name for label in labels for name in label["files"]]
    assert sorted(files) == sorted(path.name for path in CAPTURES.iterdir() if path.name != "labels.json")
    for name in files:
        data = (CAPTURES / name).read_bytes()
        text = gzip.decompress(data) if name.endswith(".gz") else data
        assert len(text) < 70_000, name
        assert b"oom_anywhere.py" not in text, name
        places = {place.decode() for place in re.findall(rb'File "(/[^/"]*/[^/"]*)', text)}
        assert places <= {"/opt/vllm", "/usr/lib"}, name
