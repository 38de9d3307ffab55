"""The list of provoked failures, their recording, and the shortening of what they print, without a GPU."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.catalogue.log_lines import log_line
from lab.engine.failure_cases import CASES
from lab.engine.failure_models import BROKEN, safetensors_file
from lab.engine.record_failures import last_oom_kill, plain_command, within_size
from lab.gpu import provoke_failures as provoke
from lab.gpu.snapshot_extension import without_machine_paths
from lab.gpu.trim_log import trim
from plimsoll.findings import Code

PLAN: dict[str, Any] = json.loads((provoke.HERE / "failure_runs.json").read_text(encoding="utf-8"))
STEPS = {"post", "metrics", "load", "wait", "sleep", "ballast", "snapshot", "kill_engine", "stop", "exit"}
KEYS = {
    "name", "model", "expect", "args", "env", "see", "kv_leave_mib", "kv_like", "keep_free_mib", "ballast", "on", "then",
    "unless", "limit",
}  # fmt: skip
OOM = (
    "(EngineCore pid=77) ERROR [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.91 GiB."
    " GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is free. Process 4711 has 20.51 GiB memory in use."
)


@pytest.mark.parametrize("entry", PLAN["runs"], ids=lambda entry: str(entry["name"]))
def test_every_run_can_be_played(entry: dict[str, Any]) -> None:
    """Each run names a known model, a real finding, texts that compile and steps that exist."""
    assert set(entry) <= KEYS
    assert entry["model"] in PLAN["models"]
    assert entry["expect"] is None or entry["expect"] in set(Code)
    assert entry["see"]
    assert all(re.compile(pattern) for pattern in entry["see"])
    assert {step[0] for step in entry.get("then", [])} <= STEPS
    assert all(isinstance(argument, str) for argument in entry["args"])
    names = [run["name"] for run in PLAN["runs"]]
    assert "kv_like" not in entry or entry["kv_like"] in names[: names.index(entry["name"])], "it comes before"
    assert entry.get("unless") in {None, *names}
    for command in [*entry.get("ballast", []), *(action for _, action in entry.get("on", []))]:
        assert re.fullmatch(r"(hold|leave) \d+|free", command)


def test_only_what_was_asked_for_and_is_not_done() -> None:
    """A second call goes on where the first one ended, and a wrong name is not passed over."""
    runs = [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert provoke.chosen(runs, "", [{"name": "a"}]) == runs[1:]
    assert provoke.chosen(runs, "c,a", []) == [runs[0], runs[2]]
    with pytest.raises(AssertionError, match="no such run: z"):
        provoke.chosen(runs, "z", [])


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


def test_a_gated_import_waits_until_it_is_let_through(tmp_path: Path) -> None:
    """A server that is started early stands still before its worker's module until the gate opens."""
    worker = tmp_path / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    (worker / "gpu_worker.py").write_text("print('at the GPU', flush=True)\n")
    (tmp_path / "sitecustomize.py").write_text(provoke.GATE)
    gate = tmp_path / "gate"
    env = {"PYTHONPATH": str(tmp_path), "PLIMSOLL_LAB_GATE": str(gate)}
    with subprocess.Popen(
        [sys.executable, "-c", f"import {provoke.GATED_MODULE}"], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        assert Path(f"{gate}.reached").exists()
        gate.touch()
        assert process.communicate(timeout=20)[0] == "at the GPU\n"


CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"


def test_long_logs_flags_and_weights_are_written_small() -> None:
    """Both ends and the last kill of a log stay; a flag is given once; weights are zeros; cases expect known codes."""
    lines = [f"line {number}" for number in range(1000)]
    kept = within_size(lines, limit=900)
    (mark,) = (line for line in kept if line.startswith("[..."))
    at = kept.index(mark)
    assert kept[:at] == lines[:at]
    assert kept[at + 1 :] == lines[-(len(kept) - at - 1) :]
    assert mark == f"[... {1000 - len(kept) + 1} lines left out ...]"
    assert sum(len(line) + 1 for line in kept) <= 900 + len(mark) + 1
    first = ["[1] a invoked oom-killer: x", "[1] Memory cgroup out of memory: Killed process 1 (a)"]
    last = ["[5] b invoked oom-killer: x", "[5] Tasks state", "[5] Memory cgroup out of memory: Killed process 2 (b)"]
    assert last_oom_kill("\n".join([*first, "[3] other", *last, "[6] other"])) == "\n".join(last) + "\n"
    assert last_oom_kill("[3] other") == ""

    command = ["vllm", "--load-format", "dummy", "--max-model-len", "2048", "--enforce-eager"]
    assert plain_command([*command, "--max-model-len", "auto"]) == [*command[:3], "--enforce-eager", "--max-model-len", "auto"]
    assert plain_command([*command, "--no-enforce-eager"]) == command[:5]
    data = safetensors_file({"a": [2, 3], "b": [4]})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["b"]["data_offsets"] == [24, 40]
    assert len(data) == 8 + length + 40

    assert len({case.name for case in CASES}) == len(CASES)
    assert {code for case in CASES for code in case.expect} <= {str(code) for code in Code}
    assert {case.model for case in CASES} - {"tiny", "/models/missing", "acme/kestrel-4b"} <= set(BROKEN)


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
