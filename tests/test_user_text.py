"""Every way vLLM prints what a user wrote or a model answered, and every ordinary line that must stay as it is."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.redaction import HIDDEN, MOST_LINES, hide_homes, hide_user_text, hide_user_text_lines
from tests.each import each

CAPTURES = Path(__file__).parents[0] / "captures"
OTHERS = Path(__file__).parents[1].parent / "shared" / "data" / "logs"

PREFIX = "(APIServer pid=1) DEBUG 11-15 09:00:00 [some_file.py:56] "
OLD = "INFO 12-16 21:40:15 logger.py:39] "
NEXT = "(APIServer pid=1) INFO 11-15 09:00:01 [other_file.py:7] Avg prompt throughput: 1.0 tokens/s, Running: 3 reqs"

# Of what users write, Q and Z are in no line of our own making: none may be left.
texts = st.text("QZQZQZ'\"\\[](){},:=. \n\té", min_size=1, max_size=60).map(lambda text: f"Q{text}Z")
quoteless = st.text("QZQZ[](){},:=. é", min_size=1, max_size=60).map(lambda text: f"Q{text}Z")
numbers = st.lists(st.integers(10**9, 10**10), min_size=1, max_size=20)


def printed(row: str, text: str) -> str:
    """A line of the rows with a user's text in it, as its repr, in JSON, or in JSON in a string."""
    known = {"json": json.dumps(text), "twice": json.dumps(json.dumps(text))[1:-1], "OLD": OLD, "PREFIX": PREFIX}
    message = json.dumps(f"Received request 1: prompt: {text!r}, params: P(n=1)")
    line = row.removeprefix("in docker: ").format(t=text, message=message, **known)
    return json.dumps({"log": line + "\n", "stream": "stdout"}) if row.startswith("in docker: ") else line


ROWS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("user_texts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS["printed"])
@given(text=texts)
def test_a_quoted_text_is_hidden(row: str, text: str) -> None:
    """Whatever a user's text is made of, nothing of it is left, and the next record stands."""
    shown = hide_user_text(printed(row, text) + "\n" + NEXT)
    assert not set(shown) & set("QZ"), shown
    assert shown.endswith("\n" + NEXT)
    assert hide_user_text(shown) == shown


@given(
    phrase=st.sampled_from(ROWS["phrases"]),
    prefix=st.sampled_from([PREFIX, OLD, "2026-11-15T09:00:00+01:00 stdout F " + PREFIX, "\x1b[36m" + PREFIX]),
    lines=st.lists(quoteless, min_size=1, max_size=4),
    is_prefixed=st.booleans(),
)
def test_a_text_over_several_lines_is_hidden_to_the_end_of_its_record(
    phrase: str, prefix: str, lines: list[str], is_prefixed: bool
) -> None:
    """vLLM puts the record's prefix before every line of it; others do not. Either way the record is hidden and no more."""
    text = ("\r\n" + prefix if is_prefixed else "\n").join(lines)
    shown = hide_user_text(f"{prefix}{phrase}{text}\n{NEXT}\nplain")
    assert not set(shown) & set("QZ"), shown
    assert shown.endswith(f"\n{NEXT}\nplain")
    assert shown.startswith(prefix)
    assert shown.count("\n") == len(lines) + 1
    assert hide_user_text(shown) == shown


@pytest.mark.parametrize("opening", ["prompt='§', n=1", 'prompt: "§", n=1', "messages=[{'content': '§'}], n=1"])
@given(text=st.text("QZ \n.", min_size=1, max_size=60))
def test_a_quote_over_several_lines_is_hidden_up_to_its_end(opening: str, text: str) -> None:
    """What stands behind the closing quote stays."""
    shown = hide_user_text(opening.replace("§", f"Q{text}Z") + "\nafter")
    assert not set(shown) & set("QZ"), shown
    assert shown.endswith(", n=1\nafter")
    assert hide_user_text(shown) == shown


def test_a_record_stays_hidden_whoever_writes_in_between() -> None:
    """On both sides of another process's line, and before a second prefix on the same line."""
    other = "(EngineCore pid=2) INFO 11-15 09:00:00 [core.py:1] fine"
    shown = hide_user_text("\n".join([f"{PREFIX}Input prompt: Q", f"{PREFIX}Q", other, f"{PREFIX}Q", NEXT]))
    assert shown.split("\n")[2:] == [other, PREFIX + HIDDEN, NEXT]
    assert "Q" not in shown
    assert "Q" not in hide_user_text(f"Input prompt: Q Q{OLD}fine")
    assert "Q" not in hide_user_text(f"{PREFIX}Input prompt: Q Q{OLD}fine")


@given(ids=numbers)
def test_token_ids_leave_their_number_behind(ids: list[int]) -> None:
    """The tokens are the text; how many there were is what an operator needs."""
    for line in ROWS["token ids"]:
        assert hide_user_text(line.format(ids)) == line.format(f"[{len(ids)} hidden]")
    for line in ROWS["token ids in what is logged otherwise"]:
        shown = hide_user_text(line.format(ids))
        assert str(ids[0]) not in shown
        assert shown.endswith(", n=1")


@each("line", ROWS["pictures"])
def test_pictures_and_sound_are_hidden(line: str) -> None:
    """What a user sent besides words goes too, and so do links to it."""
    assert "Q" not in hide_user_text(line)


@each("line", ROWS["stays"])
def test_what_an_operator_needs_stays(line: str) -> None:
    """Request ids, lengths, counts, sampling parameters, source lines of a traceback."""
    assert hide_user_text(line) == line


def logs() -> list[Path]:
    return [*sorted(CAPTURES.rglob("*.log*")), *(sorted(OTHERS.glob("*.log.gz")) if OTHERS.is_dir() else [])]


def test_recorded_logs_are_unchanged() -> None:
    """Real logs without prompts stay as they are, but for a crashed scheduler step: its token ids, and the picture it had."""
    changed = []
    for path in logs():
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
        shown = hide_user_text(text)
        changed += [new for old, new in zip(text.split("\n"), shown.split("\n"), strict=True) if old != new]
    steps = [line for line in changed if "SchedulerOutput(" in line and "token_ids=[1 hidden]" in line]
    rest = [line for line in changed if line not in steps]
    assert len(steps) <= 4
    assert all("[dump_input.py:" in line and "hidden]" in line for line in rest), rest
    assert len(rest) <= 8


fragments = st.sampled_from([
    "prompt", "messages", "content", "'content'", '"text"', "token_ids", "output", "input_value", "=", ": ", ":", "'", '"',
    "\\",
    '\\"', "[", "]", "{", "}", "(", ")", ",", ", n=1", " ", "\n", "\r\n", "hello", "it's", "1, 2", HIDDEN, "[3 hidden]", "None",
    PREFIX, OLD, NEXT, "Input prompt: ", "JSON body: ", "response_body={", "    ", '  File "a", line 1\n', "data:a/b;base64,QQ",
    "https://h/x.png", "GuidedDecodingParams(", "2026-11-15 09:00:00 ", "INFO:     ", '{"log": "', '"}',
])  # fmt: skip


@given(pieces=st.lists(fragments, max_size=40))
def test_hiding_twice_changes_nothing_more(pieces: list[str]) -> None:
    """Any mixture of what the rules look at is stable after one pass, and keeps its number of lines."""
    text = "".join(pieces)
    shown = hide_user_text(text)
    assert hide_user_text(shown) == shown
    assert shown.count("\n") == text.count("\n")
    assert list(hide_user_text_lines(text.splitlines(keepends=True))) is not None


def test_a_text_that_never_ends_is_bounded_and_home_folders_lose_their_owner() -> None:
    """A quote that is never closed hides so many lines and no more; a path stays readable, the user's name does not."""
    assert hide_user_text("\n".join(["prompt='Q", *["line"] * (MOST_LINES + 10)])).split("\n").count("line") == 10
    assert hide_homes("/home/ann/logs/x.log:3 and /Users/bo/y, /root/z") == "~/logs/x.log:3 and ~/y, ~/z"
    assert hide_homes("https://host/users/x /srv/home-made /rootfs/x") == "https://host/users/x /srv/home-made /rootfs/x"


@each("piece", ROWS["hostile"])
def test_hostile_lines_take_linear_time(piece: str) -> None:
    """Half a megabyte of what the rules look for, on one line, takes a moment of the processor."""
    line = (piece * (500_000 // len(piece) + 1))[:500_000]
    started = time.process_time()
    hide_homes(hide_user_text(line))
    assert time.process_time() - started < 5
