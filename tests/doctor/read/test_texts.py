"""Lines of text: every prefix vLLM has used, and every wrapping others put around them, taken off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.log_text import LONGEST, LogLine
from tests.each import each
from tests.log_bytes import log_of_bytes

CAPTURES = Path(__file__).parents[2] / "captures"
ERROR = "(EngineCore_DP0 pid=12) ERROR 11-15 08:00:00 [core.py:700] CUDA out of memory."


def lines_of(text: str | bytes) -> list[LogLine]:
    """What is read of this text."""
    return list(log_of_bytes("x", text if isinstance(text, bytes) else text.encode()).lines)


def only(text: str | bytes) -> LogLine:
    """The one line read of this text."""
    (line,) = lines_of(text)
    return line


def days(month: int, day: int) -> float:
    """Seconds from New Year of a leap year."""
    return (sum((31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[: month - 1]) + day - 1) * 86400.0


@each(
    ("text", "process", "level", "said"),
    [
        (ERROR, "EngineCore_DP0 pid=12", "ERROR", "CUDA out of memory."),
        ("(EngineCore pid=7) INFO 11-15 08:00:00 [v1/engine/core.py:1] text", "EngineCore pid=7", "INFO", "text"),
        ("(EngineCore pid=7) INFO 11-15 08:00:00 [model_executor/.../mxfp4.py:836] a", "EngineCore pid=7", "INFO", "a"),
        ("(VllmWorker rank=0 pid=1) ERROR 05-20 12:00:00 [file.py:1] text", "VllmWorker rank=0 pid=1", "ERROR", "text"),
        ("(Worker_TP1_EP1 pid=7) WARNING 05-20 12:00:00 [f.py:1] t", "Worker_TP1_EP1 pid=7", "WARNING", "t"),
        ("ERROR 12-16 21:40:15 engine.py:135] text", "", "ERROR", "text"),
        ("(VllmWorkerProcess pid=5) ERROR 09-01 12:00:00 multiproc_worker_utils.py:226] text",
         "VllmWorkerProcess pid=5", "ERROR", "text"),
        ("(RayWorkerVllm pid=5) INFO 12-16 21:40:15 model_runner.py:1] text", "RayWorkerVllm pid=5", "INFO", "text"),
        ("(RayWorkerWrapper pid=1, ip=10.0.0.1) text", "RayWorkerWrapper pid=1, ip=10.0.0.1", "", "text"),
        ("(pid=123) text", "pid=123", "", "text"),
        ("(EngineCore_DP0 pid=3) (RayWorkerWrapper pid=1) ERROR 01-01 00:00:00 [a.py:1] t",
         "RayWorkerWrapper pid=1", "ERROR", "t"),
        ('(EngineCore_DP0 pid=8884)   File "a.py", line 1', "EngineCore_DP0 pid=8884", "", '  File "a.py", line 1'),
        ('(EngineCore_DP0 pid=1) ERROR 11-15 08:00:00 [core.py:700]   File "a.py"',
         "EngineCore_DP0 pid=1", "ERROR", '  File "a.py"'),
        ("(EngineCore pid=1) ERROR 11-15 08:00:00 [core.py:700] ", "EngineCore pid=1", "ERROR", ""),
        ("[rank0]: Traceback (most recent call last):", "rank0", "", "Traceback (most recent call last):"),
        ("[rank0]:[W1115 08:00:00.1 Guard.h:1] Warning: x", "rank0", "WARNING", "[W1115 08:00:00.1 Guard.h:1] Warning: x"),
        ("(APIServer pid=1) INFO:     127.0.0.1:1 - \"GET / HTTP/1.1\" 200 OK", "APIServer pid=1", "INFO",
         "INFO:     127.0.0.1:1 - \"GET / HTTP/1.1\" 200 OK"),
        ("ERROR:    Application startup failed. Exiting.", "", "ERROR", "ERROR:    Application startup failed. Exiting."),
        ("    (EngineCore pid=1) INFO 11-15 08:00:00 [core.py:700] posted indented",
         "EngineCore pid=1", "INFO", "posted indented"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "", "", "torch.OutOfMemoryError: CUDA out of memory."),
        ("INFO about something else", "", "", "INFO about something else"),
        ("(EngineCore pid=x) text", "", "", "(EngineCore pid=x) text"),
    ],
)  # fmt: skip
def test_what_a_line_says_of_itself_is_taken_off(text: str, process: str, level: str, said: str) -> None:
    """Process, level and text, in every form vLLM, Ray and torch have used; what is no prefix stays."""
    line = only(text)
    assert (line.process, line.level, line.text, line.number) == (process, level, said, 1)


STAMP = "2025-11-15T08:00:00.123456789Z"


@each(
    ("wrapped", "server"),
    [
        (json.dumps({"log": f"{ERROR}\n", "stream": "stderr", "time": STAMP}), ""),
        (f"vllm-1  | {ERROR}", "vllm-1"),
        (f"vllm_1  | {ERROR}", "vllm_1"),
        (f"[pod/vllm-0/server] {ERROR}", "vllm-0/server"),
        (f"[pod/vllm-0/server] {STAMP} {ERROR}", "vllm-0/server"),
        (f"{STAMP} {ERROR}", ""),
        (f"2025-11-15T08:00:00+00:00 {ERROR}", ""),
        (f"{STAMP} stdout F {ERROR}", ""),
        (f"{STAMP} stderr F {ERROR}", ""),
        (f"Nov 15 08:00:00 gpu-7 vllm[123]: {ERROR}", "vllm"),
        (f"Nov  5 08:00:00 gpu-7 python3.12[123]: {ERROR}", "python3.12"),
        (f"2025-11-15T08:00:00.123456+00:00 gpu-7 vllm[123]: {ERROR}", "vllm"),
        (json.dumps({"MESSAGE": ERROR, "_SYSTEMD_UNIT": "vllm.service", "__REALTIME_TIMESTAMP": "1763193600000000"}), "vllm"),
        (json.dumps({"MESSAGE": list(f"\x1b[31m{ERROR}\x1b[0m".encode()), "CONTAINER_NAME": "llm"}), "llm"),
        (json.dumps({"message": ERROR, "timestamp": STAMP, "level": "error"}), ""),
        (json.dumps({"msg": ERROR}), ""),
        (json.dumps({"text": ERROR}), ""),
        (json.dumps({"labels": {"app": "vllm"}, "line": ERROR, "timestamp": STAMP}), ""),
        (json.dumps({"log": ERROR, "kubernetes": {"pod_name": "vllm-0"}}), "vllm-0"),
        (f"[2025-11-15 08:00:00] {ERROR}", ""),
        (f"\x1b[36mvllm-1  | \x1b[0m{ERROR}", "vllm-1"),
        ("\x1b[0;36m" + ERROR.replace(") ", ")\x1b[0;0m ", 1), ""),
        ("[0;36m" + ERROR.replace(") ", ")[0;0m ", 1), ""),
        ("\\u001b[36m" + ERROR.replace(") ", ")\\u001b[0m ", 1), ""),
        ("#033[36m" + ERROR.replace(") ", ")#033[0m ", 1), ""),
        (json.dumps({"log": f"{STAMP} stdout F {ERROR}\n", "stream": "stdout"}), ""),
        (f"Nov 15 08:00:00 h dockerd[1]: vllm-1  | {STAMP} {ERROR}", "vllm-1"),
        (f"{ERROR}\r", ""),
    ],
)  # fmt: skip
def test_wrappings_come_off(wrapped: str, server: str) -> None:
    """The line is what the program said, and the container, pod or unit is kept apart."""
    line = only(wrapped)
    assert (line.process, line.level, line.text) == ("EngineCore_DP0 pid=12", "ERROR", "CUDA out of memory.")
    assert line.server == server
    assert line.at is not None


@each(
    "text",
    [
        "CUDA error: out of memory", "torch.OutOfMemoryError: CUDA out of memory.",
        "Memory cgroup out of memory: Killed process 1 (python)", "| Allocated memory | 12 MiB |",
        "{'model_tag': 'm', 'port': 8000}", '{"error": {"message": "x"}}', "{ not json }", "[pod] x", "[1/3] Compiling",
        "[ 123.456] NVRM: Xid (PCI:0000:01:00): 79", "usage | help", "> quoted once",
    ],
)  # fmt: skip
def test_what_only_looks_wrapped_stays(text: str) -> None:
    """A message is never eaten for a prefix, bare or behind a stamp."""
    assert only(text).text == text
    assert only(f"{STAMP} {text}").text == text


def test_times_are_seconds_that_compare() -> None:
    """vLLM's stamps count from New Year, roll over it, and a runtime's stamp with a year wins."""
    new_year = lines_of("INFO 12-31 23:59:59 [a.py:1] a\nINFO 01-01 00:00:01 [a.py:1] b\n")
    assert new_year[1].at == pytest.approx((new_year[0].at or 0) + 2)
    leap = lines_of("INFO 02-28 00:00:00 [a.py:1] a\nINFO 02-29 00:00:00 [a.py:1] b\nINFO 11-15 08:00:00 [a.py:1] c\n")
    assert [(line.at or 0) - (leap[0].at or 0) for line in leap] == [0, 86400, days(11, 15) - days(2, 28) + 8 * 3600]
    assert only(f"{STAMP} INFO 01-01 00:00:00 [a.py:1] a").at == pytest.approx(1763193600.123, abs=1e-3)
    assert only("2025-11-15T10:00:00+02:00 a").at == 1763193600
    assert only("INFO 13-45 08:00:00 [a.py:1] a").at is None


def test_a_prefix_of_every_line_is_the_servers_name() -> None:
    """A compose service without a number or a one-word prefix counts only where nearly all lines have it."""
    many = [line.server for line in lines_of("\n".join(f"llm | line {n}" for n in range(10)))]
    assert many == ["llm"] * 10
    few = lines_of(
        "\n".join([*(f"line {n}" for n in range(30)), *[f"llm  | {ERROR}"] * 3, "llm  | Traceback:", "usage | help"])
    )
    assert [(line.server, line.text) for line in few[-3:]] == [
        ("llm", "CUDA out of memory."), ("llm", "Traceback:"), ("", "usage | help"),
    ]  # fmt: skip
    words = lines_of("\n".join(f"vllm-server: {ERROR}" for _ in range(10)))
    assert {(line.server, line.level, line.text) for line in words} == {("vllm-server", "ERROR", "CUDA out of memory.")}
    mixed = lines_of("\n".join(["vllm-server: a", *(f"line {n}" for n in range(10))]))
    assert mixed[0].text == "vllm-server: a"
    levels = lines_of("\n".join(["ERROR: a"] * 10))
    assert {(line.level, line.text) for line in levels} == {("ERROR", "ERROR: a")}


def test_a_quotation_in_an_issue_is_unquoted() -> None:
    """Code fences go, quote marks go, numbers stay those of the file."""
    text = f'It fails:\n```shell\n> {ERROR}\n>   File "a.py"\n> end\n```\n'
    assert [(line.number, line.text) for line in lines_of(text)] == [
        (1, "It fails:"), (3, "CUDA out of memory."), (4, '  File "a.py"'), (5, "end"),
    ]  # fmt: skip


def test_progress_bars_show_their_last_state() -> None:
    """Frames that overwrite each other are one; a message between them stays; all have the line's number."""
    bar = "Loading safetensors checkpoint shards:  {}% Completed | {}/7 [00:00<00:01,  2.14s/it]"
    text = "a\n(EngineCore pid=7) \r" + "\r".join(bar.format(14 * n, n) for n in range(1, 5)) + "\rRuntimeError: x\r\nb\r\n"
    assert [(line.number, line.process, line.text) for line in lines_of(text)] == [
        (1, "", "a"), (2, "EngineCore pid=7", bar.format(56, 4)), (2, "EngineCore pid=7", "RuntimeError: x"), (3, "", "b"),
    ]  # fmt: skip


def test_two_writers_on_one_line_are_taken_apart() -> None:
    """A prefix in the middle of a line begins another line of the same number."""
    text = "Capturing CUDA graphs:  67%|##| 2/3(EngineCore pid=7) ERROR 01-01 00:00:00 [a.py:1] died"
    assert [(line.process, line.level, line.text) for line in lines_of(text)] == [
        ("", "", "Capturing CUDA graphs:  67%|##| 2/3"), ("EngineCore pid=7", "ERROR", "died"),
    ]  # fmt: skip
    assert [line.text for line in lines_of("1/3 [00:01<00:02, 2.1s/it]INFO 01-01 00:00:00 [a.py:1] went on")][1] == "went on"
    quoted = "the worker (EngineCore pid=7) is gone"
    assert only(quoted).text == quoted


def test_a_traceback_posted_on_one_line_comes_apart_at_its_prefixes() -> None:
    """Where each frame kept its prefix they are lines again; without prefixes nothing is lost."""
    frames = " ".join(f"(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:{n}] frame {n}" for n in range(40))
    assert [line.text.strip() for line in lines_of(frames)] == [f"frame {n}" for n in range(40)]
    flat = "Traceback (most recent call last): " + 'File "a.py", line 1, in f ' * 100
    assert only(flat).text == flat


def test_lines_a_runtime_cut_are_whole_again() -> None:
    """CRI's partial lines and docker's 16 kB records are joined under the number of the first."""
    pieces = ("P ERROR 01-01 00:00:00 [a.py:1] one ", "P two ", "F three", "F next")
    cri = "\n".join(f"{STAMP} stdout {piece}" for piece in pieces)
    assert [(line.number, line.text) for line in lines_of(cri)] == [(1, "one two three"), (4, "next")]
    long = "x" * 16_384
    docker = json.dumps({"log": long, "stream": "stdout"}) + "\n" + json.dumps({"log": "end\n", "stream": "stdout"})
    assert [len(line.text) for line in lines_of(docker)] == [LONGEST]
    short = json.dumps({"log": "a", "stream": "stdout"}) + "\n" + json.dumps({"log": "b", "stream": "stdout"})
    assert [line.text for line in lines_of(short)] == ["a", "b"]
    assert [line.text for line in lines_of(f"{STAMP} stdout P never finished\n")] == ["never finished"]


def test_a_message_of_many_lines_in_json_is_many_lines() -> None:
    """A structured record's traceback is read like any other, under the record's number."""
    record = {"message": "failed", "levelname": "ERROR", "exc_info": 'Traceback (most recent call last):\n  File "a.py"\nE: x'}
    found = lines_of("start\n" + json.dumps(record))
    assert [(line.number, line.level, line.text) for line in found[1:]] == [
        (2, "ERROR", "failed"), (2, "ERROR", "Traceback (most recent call last):"),
        (2, "ERROR", '  File "a.py"'), (2, "ERROR", "E: x"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "records",
    [
        [{"insertId": "1", "textPayload": ERROR, "resource": {"type": "k8s_container"}}] * 6,
        {"events": [{"timestamp": 1, "message": ERROR, "ingestionTime": 2}] * 6, "nextForwardToken": "f/1"},
    ],
)
def test_indented_json_of_a_clouds_console_is_the_programs_words(records: object) -> None:
    """The field with the words is the log; the others would tear a traceback apart."""
    found = lines_of(json.dumps(records, indent=2))
    assert [(line.process, line.text) for line in found] == [("EngineCore_DP0 pid=12", "CUDA out of memory.")] * 6


def test_odd_lines_stay_lines() -> None:
    """A bar with nothing behind it, other indented JSON, an endless line of which LONGEST characters are kept."""
    assert [line.text for line in lines_of("said |\nsaid |\nsaid |")] == ["said |"] * 3
    text = json.dumps({"items": [{"message": "Back-off", "restartCount": 4}] * 6}, indent=2)
    assert [line.text for line in lines_of(text)] == text.split("\n")
    assert [len(line.text) for line in lines_of("a" * (LONGEST + 5) + "\nb")] == [LONGEST, 1]
    bars = "\r".join(f" {n}%|#| {n}/9 [" for n in range(300_000)) + "\rRuntimeError: at the end"
    assert lines_of(bars)[-1].text == "RuntimeError: at the end"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(encoding: str) -> None:
    """UTF-8 with or without a mark, and what Windows writes, are all the same text."""
    assert [line.text for line in lines_of(f"{ERROR}\r\nVerfügbar: 3 GiB\r\n".encode(encoding))] == [
        "CUDA out of memory.", "Verfügbar: 3 GiB",
    ]  # fmt: skip


def test_broken_bytes_and_nul_bytes_do_not_hide_the_rest() -> None:
    """Bytes that are no UTF-8 are replaced; a hole that log rotation left at the start is passed over."""
    assert [line.text for line in lines_of(b"caf\xe9 au lait\nend\n")] == ["caf\ufffd au lait", "end"]
    assert [line.text for line in lines_of(b"\0" * 100_000 + b"one\ntw\0o\n")] == ["one", "two"]


@each("path", sorted(CAPTURES.rglob("*.log*")), ids=lambda path: path.name)
def test_captures_read_whole(path: Path) -> None:
    """Every line of a real log is there, in order, with its number, and vLLM's prefix is off all of them."""
    log = read_log(str(path))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    raw = data.decode("utf-8", "replace").split("\n")
    assert {line.number for line in log.lines} >= {n for n, text in enumerate(raw, 1) if text.strip()}
    assert [line.number or 0 for line in log.lines] == sorted(line.number or 0 for line in log.lines)
    assert all(line.text in raw[(line.number or 0) - 1] for line in log.lines if "\x1b" not in raw[(line.number or 0) - 1])
    assert not [line for line in log.lines if line.text.startswith("(EngineCore pid=")]
    assert log.skipped == ()
