"""Properties of the text reader: it never breaks, numbers are those of the file, and wrapping changes nothing."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read import text as text_wrapping
from plimsoll.doctor.read.text import LEVELS, StampClock, split_writers
from plimsoll.doctor.rules.log_text import LONGEST, LogLine
from plimsoll.errors import BadInput
from tests.each import each
from tests.log_bytes import log_of_bytes

STAMP = "2025-11-15T08:00:00.123456789Z"
PIECES = [
    "(EngineCore pid=7) ", "ERROR 01-01 00:00:00 [a.py:1] ", "INFO 12-16 21:40:15 engine.py:135] ", f"{STAMP} ", "stdout F ",
    "stdout P ", '{"log":"', '"}', '{"MESSAGE":[', "[pod/a/b] ", "vllm-1  | ", "Nov 15 08:00:00 h u[1]: ", "\r", "\n",
    "\x1b[36m", "\\u001b[0m", "> ", "```", "\0", "[rank0]: ", " 14%|##| 1/7 [", "(pid=1) ", "word: ", "\ufeff", "█", " " * 40,
    "(" * 50, "[" * 50, "[2025-11-15 08:00:00] ", "9" * 400, "\\" * 30, '"', "Traceback (most recent call last):",
]  # fmt: skip
# A message: no control characters, and nothing that is itself a prefix or a wrapping.
# Without a bar: "said |" in front of every line is how compose names a server.
MESSAGES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="|"), max_size=80
).map(lambda t: f"said {t}")


def lines_of(text: str) -> list[LogLine]:
    """What is read of this text."""
    return list(log_of_bytes("x", text.encode("utf-8", "surrogatepass")).lines)


@given(st.binary(max_size=4000))
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    """Nothing but BadInput comes of bytes; packed or not."""
    for given_bytes in (data, gzip.compress(data), b"\x1f\x8b\x08" + data, b"\xff\xfe" + data, b"log\n" * 100 + data):
        with suppress(BadInput):
            for line in log_of_bytes("x", given_bytes).lines:
                assert len(line.text) <= LONGEST


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=10)), max_size=40).map("".join))
def test_any_mix_of_prefixes_is_read(text: str) -> None:
    """However prefixes and wrappings are put together, lines come out in order, with a known level."""
    with suppress(BadInput):
        lines = list(log_of_bytes("x", text.encode("utf-8", "replace")).lines)
        numbers = [line.number or 0 for line in lines]
        assert numbers == sorted(numbers) or '{"log' in text or "stdout P" in text
        assert all(1 <= number <= text.count("\n") + 1 for number in numbers)
        assert {line.level for line in lines} <= {"", *LEVELS.values()}
        assert all("\x1b" not in line.text and "\n" not in line.text for line in lines)


@given(st.lists(MESSAGES, min_size=1, max_size=20))
def test_plain_lines_come_through_unchanged(messages: list[str]) -> None:
    """A line without prefix is its own text, under its own number."""
    assert [(line.number, line.text) for line in lines_of("\n".join(messages))] == list(enumerate(messages, 1))
    assert [line.text for line in lines_of("\r\n".join(messages))] == messages


WRAPPINGS = {
    "docker": lambda text: json.dumps({"log": text + "\n", "stream": "stdout", "time": STAMP}),
    "journal JSON": lambda text: json.dumps({"MESSAGE": list(text.encode()), "_SYSTEMD_UNIT": "vllm.service"}),
    "structured": lambda text: json.dumps({"level": "info", "msg": text}, ensure_ascii=False),
    "compose": lambda text: f"vllm-1  | {text}",
    "pod": lambda text: f"[pod/vllm-0/server] {text}",
    "stamp": lambda text: f"{STAMP} {text}",
    "CRI": lambda text: f"{STAMP} stderr F {text}",
    "CRI in parts": lambda text: f"{STAMP} stderr P {text[:3]}\n{STAMP} stderr F {text[3:]}",
    "journal": lambda text: f"Nov 15 08:00:00 gpu-7 vllm[123]: {text}",
    "syslog": lambda text: f"2025-11-15T08:00:00+00:00 gpu-7 vllm[123]: {text}",
    "tee": lambda text: f"[2025-11-15 08:00:00] {text}",
    "colour": lambda text: f"\x1b[1;31m{text}\x1b[0m",
}


@pytest.mark.parametrize("outer", WRAPPINGS)
@given(inner=st.sampled_from(sorted(WRAPPINGS)), message=MESSAGES)
def test_what_was_wrapped_comes_out_as_it_went_in(outer: str, inner: str, message: str) -> None:
    """Text, process and level of a line are the same within any wrapping, and within two."""
    if inner == "CRI in parts":
        inner = "CRI"  # a runtime cuts the outermost line only
    line = f"(EngineCore_DP0 pid=12) ERROR 11-15 08:00:00 [core.py:700] {message}"
    for wrapped in (WRAPPINGS[outer](line), WRAPPINGS[outer](WRAPPINGS[inner](line))):
        (found,) = lines_of(wrapped)
        assert (found.process, found.level, found.text) == ("EngineCore_DP0 pid=12", "ERROR", message)
        assert found.number == 1
        assert found.at is not None


@given(st.text(max_size=200), st.text(max_size=200))
def test_taking_apart_loses_nothing(before: str, after: str) -> None:
    """The parts put together are the line."""
    text = f"{before}(EngineCore pid=7) ERROR 01-01 00:00:00 [a.py:1] {after}"
    assert "".join(split_writers(text)) == text


@given(st.text(max_size=30))
def test_no_stamp_breaks_the_clock(stamp: str) -> None:
    """What is no time has none."""
    StampClock().seconds(stamp)


@each(
    "line",
    [
        "(" * 16_000, "[" * 16_000, "{" * 16_000, " " * 16_000, "(a " * 5_000, "(EngineCore pid=" * 1_000,
        "ERROR 01-01 " * 1_500, '{"log":' * 2_000 + '"x"' + "}" * 2_000, "a" * 80 + " " * 15_000 + "|", "> " * 8_000,
        "\r" * 16_000, "1% " * 5_000, "\x1b[" * 8_000, "2025-11-15T08:00:00Z " * 700, "[2025-11-15 08:00:00] " * 700,
        "vllm-1 | " * 1_500, '{"message":"' + "\\n" * 5_000 + '"}', "INFO 01-01 00:00:00 [" + "a/" * 8_000,
    ],
    ids=lambda line: line[:12],
)  # fmt: skip
def test_no_line_takes_long(line: str) -> None:
    """A hostile line of 16 kB costs milliseconds, not seconds."""
    data = (line + "\n").encode() * 20
    begin = time.process_time()
    log_of_bytes("x", data)
    assert time.process_time() - begin < 2.0


def test_wrappings_within_wrappings_end_somewhere() -> None:
    """A line wrapped a hundred times is unwrapped a few times and left."""
    (found,) = lines_of("vllm-1  | " * 100 + "text")
    assert found.text == "vllm-1  | " * (100 - text_wrapping.DEPTH) + "text"


REAL = Path(__file__).parents[2] / "captures" / "vllm-0.25.1-h200" / "base.log"


def test_two_servers_in_one_file_are_told_apart() -> None:
    """Compose mixes them line by line; each one's lines are all there, in their order."""
    raw = REAL.read_text(encoding="utf-8").splitlines()
    mixed = lines_of("\n".join(f"{name:8}| {line}" for line in raw for name in ("llm-a", "llm-b")))
    for name in ("llm-a", "llm-b"):
        assert [line.text for line in mixed if line.server == name] == [line.text for line in lines_of("\n".join(raw))]
