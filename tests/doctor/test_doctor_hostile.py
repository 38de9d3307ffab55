"""Whatever stands in a log, doctor answers, soon, and with one of three words on memory."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose
from plimsoll.doctor.rules.log_text import LONGEST
from plimsoll.errors import BadInput
from plimsoll.render.doctor import as_json, as_text
from plimsoll.vllm.failure_texts import TEXTS
from tests.doctor.labelled import labelled
from tests.doctor.log_maker import ENGINE_DEAD, NOT_STARTED, OOM, REQUEST, STARTED, VERSION, traceback
from tests.each import each
from tests.log_bytes import log_of_bytes

LONGEST_QUOTE = 400
PREFIXES = (
    "", "(EngineCore pid=2) ", "(Worker_TP1 pid=9) ERROR 11-15 09:00:00 [a.py:1] ",
    "(APIServer pid=1) INFO 11-15 09:00:00 [b.py:2] ", "[rank0]: ", "| ", "ERROR 12-16 21:40:15 core.py:39] ",
    "vllm-1  | ", "Nov 15 09:00:00 host kernel: ", "\x1b[31m", "  ", "    ", '{"log": "',
    "2026-11-15T09:00:00.1Z stderr F ", "[12345.678] ",
)  # fmt: skip
WORDS = (
    *(text.needle for text in TEXTS), OOM, *STARTED, *traceback("v1/worker/gpu_worker.py:load_model"), ENGINE_DEAD,
    NOT_STARTED, "Traceback (most recent call last):", '  File "', '", line ', ", in ", "File ~/a.py:3, in f(x)",
    "--- Logging error ---", "Call stack:", "Message: ",
    "During handling of the above exception, another exception occurred:", "Error: ", "Exception",
    "Process 99 has 17179869184.00 GiB memory in use", "Tried to allocate 99999999999999999999.00 GiB",
    "total capacity of 0 bytes", "non-default args: {'model': ", "with config: model=",
    "SchedulerStats(num_running_reqs=1.2.3, kv_cache_usage=.", "NVRM: Xid (",
    "GPU KV cache usage: 100.0%, Running: 9 reqs, Waiting: 9 reqs, Avg prompt throughput: 1.0 tokens/s",
    "died, exit code: -99999", "Last State:     Terminated", "Reason: OOMKilled", "Exit Code: 137", "| NVIDIA-SMI ", "MiB |",
    "Killed process 3 (", "oom-kill:", "CUDA OOMs: 3 | cudaMalloc retries: 9", "| Allocated memory      |", '\\n  File \\"',
    "\\n", "(", ")", "'", '"', "{", "[", "%", "é", "\0", "1e999", "-1", "\uff19", "GiB", "Available KV cache memory: -",
    "is preempted by", "total_cumulative_preemption_cnt=1",
)  # fmt: skip
words = st.sampled_from(WORDS)
lines = st.builds(
    lambda prefix, parts, ending: prefix + "".join(parts) + ending,
    st.sampled_from(PREFIXES),
    st.lists(st.one_of(words, st.text(max_size=12)), max_size=5),
    st.sampled_from(["", "\r", "\\n", '"']),
)
texts = st.lists(lines, max_size=40).map(lambda found: "\n".join(found).encode("utf-8", "surrogatepass"))
CAPTURES = [one.data() for one in labelled()]


def answered(data: bytes, exit_code: int | None = None) -> Diagnosis | None:
    """The answer, rendered both ways, with what must hold of every answer; None where it is refused as no text."""
    try:
        log = log_of_bytes("x.log", data)
    except BadInput:
        return None
    found = diagnose([log], exit_code=exit_code)
    assert found.memory_failure in (True, False, None)
    for finding in found.findings:
        assert 0.0 <= finding.confidence <= 1.0
        assert finding.title
        assert finding.because
        for evidence in finding.evidence:
            assert len(evidence.text) <= LONGEST_QUOTE
    json.loads(as_json(found), parse_constant=pytest.fail)  # NaN and Infinity are not JSON; a quoted line may hold the word
    assert all(letter.isprintable() for line in str(as_text(found)).split("\n") for letter in line)
    return found


@given(texts, st.one_of(st.none(), st.integers(-70_000, 70_000)))
def test_lines_made_of_telling_words_are_answered(data: bytes, exit_code: int | None) -> None:
    """Any order and mixture of the words it knows, with any prefix: an answer, in time."""
    answered(data, exit_code)


@given(st.sampled_from(CAPTURES), st.data())
def test_a_real_log_with_bytes_thrown_in_is_answered(capture: bytes, data: st.DataObject) -> None:
    """Random bytes anywhere in a piece of a real log."""
    start = data.draw(st.integers(0, max(0, len(capture) - 4_000)))
    piece = bytearray(capture[start : start + 4_000])
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(piece)))
        piece[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=12)).replace(b"\0", b" ")
    answered(bytes(piece))


STUFF = {
    "a": "a", "bracket": "(", "square": "[", "digit": "7", "quote": "'", "double": '"', "backslash": "\\", "space": " ",
    "dot": ".", "comma": ",", "colon": ":", "equals": "=", "escaped": "\\n", "word": "Error ", "frame": 'File "',
    "dotted": "a.", "dash": "-", "slash": "/", "pipe": "|", "unit": "1 GiB ", "nested": "{'", "pid": "pid=", "camel": "aB",
}  # fmt: skip
OPENINGS = (
    "", "(EngineCore pid=2) ERROR 11-15 09:00:00 [a.py:1] ",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ", "non-default args: {",
    "Initializing a V1 LLM engine (v0.25.1) with config: ", '  File "', "Process ", "SchedulerStats(",
    "Out of memory: Killed process 7 (", "NVRM: Xid (PCI:", "ValidationError: ", "Engine 000: Avg prompt throughput: ",
    "[rank0]: ", "Received request a: prompt: '", "run.sh: line ", "GPU blocks: ", "File ~/", "Worker died unexpectedly (",
    "HF_TOKEN=", "|    0   N/A  N/A  ",
)  # fmt: skip


@each("name", STUFF)
def test_a_long_line_costs_no_more_than_its_length(name: str) -> None:
    """Each opening that some pattern looks for, followed by 16 KiB of one thing: no pattern goes back and forth over it."""
    unit = STUFF[name]
    began = time.process_time()
    for opening in OPENINGS:
        data = (opening + unit * (LONGEST // len(unit))).encode()
        answered(VERSION.encode() + b"\n" + data + b"\n" + REQUEST.encode() + b"\n")
    assert time.process_time() - began < 4.0, "20 lines of 16 KiB"


REPEATED = (
    OOM, REQUEST, VERSION, ENGINE_DEAD, "Traceback (most recent call last):", '  File "/a/vllm/b.py", line 1, in f',
    "ValueError: x", "--- Logging error ---", "Killed", "[1.0] Out of memory: Killed process 7 (a)",
)  # fmt: skip


@each("repeated", REPEATED)
def test_one_line_thousands_of_times_is_answered_in_time(repeated: str) -> None:
    """A log that repeats itself does not make the judge go over it again for each line."""
    began = time.process_time()
    answered(f"{repeated}\n".encode() * 3_000)
    assert time.process_time() - began < 2.0


def test_a_healthy_server_is_not_blamed_for_random_words_of_its_users() -> None:
    """Access lines and INFO lines that speak of memory change nothing."""
    said = [f"(APIServer pid=1) INFO 11-15 09:05:00 [logger.py:1] note: {text.needle}" for text in TEXTS if not text.any_level]
    found = answered(("\n".join([*STARTED, *said, *[REQUEST] * 5]) + "\n").encode())
    assert found is not None
    assert found.memory_failure is False
