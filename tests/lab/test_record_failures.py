"""What is kept of a recorded failure: the engine's own words, none of this machine's and none of ours."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from lab.engine.failure_cases import CASES
from lab.engine.failure_models import BROKEN, safetensors_file
from lab.engine.record_failures import (
    last_oom_kill,
    plain_command,
    within_size,
)
from plimsoll.findings import Code

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"


def test_a_long_log_keeps_both_ends_and_the_last_kill() -> None:
    """The line in the middle's place says how much went; of the kernel's words those about who died."""
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


def test_a_flag_is_given_once_and_weights_are_a_header_and_zeros() -> None:
    """The case's own value stays; the offsets cover the values exactly."""
    command = ["vllm", "--load-format", "dummy", "--max-model-len", "2048", "--enforce-eager"]
    assert plain_command([*command, "--max-model-len", "auto"]) == [*command[:3], "--enforce-eager", "--max-model-len", "auto"]
    assert plain_command([*command, "--no-enforce-eager"]) == command[:5]
    data = safetensors_file({"a": [2, 3], "b": [4]})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["b"]["data_offsets"] == [24, 40]
    assert len(data) == 8 + length + 40


def test_every_case_has_a_name_of_its_own_and_expects_known_codes() -> None:
    """A code that does not exist could never be found."""
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
