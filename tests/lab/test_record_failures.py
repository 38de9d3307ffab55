"""What is kept of a recorded failure: the engine's own words, none of this machine's and none of ours."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from lab.engine.failure_cases import CASES
from lab.engine.failure_models import BROKEN, safetensors_file
from lab.engine.record_failures import (
    few_of_each_request,
    last_oom_kill,
    plain_command,
    trim,
    within_size,
    without_our_frames,
    write_kept,
)
from plimsoll.findings import Code

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"
HEAD = "(Worker pid=7) ERROR 11-15 08:57:56 [multiproc_executor.py:1063] "


@pytest.mark.parametrize("head", ["", HEAD, "(EngineCore pid=9) "])
def test_the_plugin_leaves_no_frame(head: str) -> None:
    """The frame that raised goes with its source and its marks; the engine's own frames and the error stay."""
    engine = ['  File "/opt/vllm/linear.py", line 610, in forward', "    x = self.apply(y)", "        ^^^^^^^^^^^^^"]
    ours = ['  File "/x/oom_anywhere/oom_anywhere.py", line 41, in fail_or_call', "    raise error_of(fault)", "    ^^^^^^^"]
    error = ["torch.OutOfMemoryError: CUDA out of memory.", ""]
    lines = [head + line for line in (*engine, *ours, *error)]
    assert without_our_frames(lines) == [head + line for line in (*engine, *error)]


def test_a_frame_after_the_plugins_stays() -> None:
    """A frame that follows ours, as when the wrapped function itself failed, is the engine's and stays."""
    ours = ['  File "/x/oom_anywhere.py", line 42, in fail_or_call', "    return real(*args, **kwargs)"]
    theirs = ['  File "/opt/vllm/a.py", line 1, in b', "    c()"]
    assert without_our_frames([*ours, *theirs]) == theirs


def test_paths_of_the_machine_are_replaced_longest_first() -> None:
    """A path within another gets its own name, not the outer one's."""
    places = {"/cache/engine": "/opt/vllm", "/cache/engine/lib/site-packages": "/opt/vllm/site-packages"}
    assert (
        trim("/cache/engine/lib/site-packages/a.py /cache/engine/bin", places) == "/opt/vllm/site-packages/a.py /opt/vllm/bin"
    )


def test_our_own_questions_are_not_kept() -> None:
    """The polling of /health is ours; what clients asked is not."""
    asked = 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'
    assert trim(f'INFO:     127.0.0.1:2 - "GET /health HTTP/1.1" 200 OK\n{asked}', {}) == asked


def test_few_lines_of_the_same_request_are_kept() -> None:
    """Of a hundred equal requests eight lines stay, of another kind all, and nothing else is touched."""
    equal = [f'INFO:     127.0.0.1:{port} - "POST /v1/completions HTTP/1.1" 200 OK' for port in range(100)]
    other = 'INFO:     127.0.0.1:9 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    assert few_of_each_request([*equal, other, "text", "text"]) == [*equal[:8], other, "text", "text"]


def test_a_long_log_keeps_both_ends_and_says_so() -> None:
    """The middle goes, the line in its place says how much, and the result respects the limit."""
    lines = [f"line {number}" for number in range(1000)]
    kept = within_size(lines, limit=900)
    (mark,) = (line for line in kept if line.startswith("[..."))
    at = kept.index(mark)
    assert kept[:at] == lines[:at]
    assert kept[at + 1 :] == lines[-(len(kept) - at - 1) :]
    assert mark == f"[... {1000 - len(kept) + 1} lines left out ...]"
    assert sum(len(line) + 1 for line in kept) <= 900 + len(mark) + 1


def test_a_short_log_is_kept_whole() -> None:
    """Nothing is left out of what is small enough."""
    assert within_size(["a", "b"], limit=4) == ["a", "b"]


def test_a_long_file_is_compressed_and_replaces_the_plain_one(tmp_path: Path) -> None:
    """One file a log: what was there before, in the other form, is gone."""
    assert write_kept(tmp_path / "a.log", "short") == "a.log"
    assert write_kept(tmp_path / "a.log", "long " * 10_000) == "a.log.gz"
    assert [path.name for path in tmp_path.iterdir()] == ["a.log.gz"]
    assert gzip.decompress((tmp_path / "a.log.gz").read_bytes()) == b"long " * 10_000


def test_the_last_kill_is_cut_out_of_the_kernels_words() -> None:
    """From the line that asks for memory to the line that names the dead, and nothing where nobody died."""
    first = ["[1] a invoked oom-killer: x", "[1] Memory cgroup out of memory: Killed process 1 (a)"]
    last = ["[5] b invoked oom-killer: x", "[5] Tasks state", "[5] Memory cgroup out of memory: Killed process 2 (b)"]
    assert last_oom_kill("\n".join([*first, "[3] other", *last, "[6] other"])) == "\n".join(last) + "\n"
    assert last_oom_kill("[3] other") == ""


def test_a_flag_given_twice_is_given_once() -> None:
    """The case's own value stays and the lab's goes."""
    command = ["vllm", "--load-format", "dummy", "--max-model-len", "2048", "--enforce-eager"]
    assert plain_command([*command, "--max-model-len", "auto"]) == [*command[:3], "--enforce-eager", "--max-model-len", "auto"]
    assert plain_command([*command, "--no-enforce-eager"]) == command[:5]


def test_a_file_of_weights_is_a_header_and_zeros() -> None:
    """The header's length comes first, and the offsets cover the values exactly."""
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
