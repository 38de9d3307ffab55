"""What is no trace, or only almost one: one clear line, and never anything else."""

from __future__ import annotations

import contextlib
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.simulate import trace_columns
from plimsoll.simulate.trace import Arrivals, arrival_times
from plimsoll.simulate.trace_files import read_lengths, read_measured, read_timeseries, read_trace
from tests.each import each

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = b"2023-11-16 18:15:46.5,10,2\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}\n'
RECORDED = b'{"schema":"plimsoll.request/1","prompt_tokens":1,%s}\n'
SERIES = b"t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n"
BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def refusal(tmp_path: Path, content: bytes, **options: object) -> str:
    """The one line that says why this is no trace."""
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_trace(str(tmp_path / "t"), **options)  # type: ignore[arg-type]
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 300 + len(str(tmp_path))
    return said.replace(str(tmp_path / "t"), "T")


@each(
    ("content", "said"),
    [
        (b"", "T: no request in it"),
        (b"\n  \n", "T: no request in it"),
        (AZURE, "T: no request in it"),
        (BURST + b"5,m,1,0,1,x\n", "T: no request in it that was answered"),
        (b"a,b\n1,2\n", "T, line 1: not a trace"),
        (b"\xff\xfe\x00", "T, line 1: not text"),
        (b"{bad\n", "T, line 1: not JSON"),
        (b"[1]\n", "T, line 1: not a trace"),
        (b'{"a": 1}\n', "T, line 1: not a trace"),
        (b'{"a":' * 100_000 + b"\n", "T, line 1: not JSON"),
        (AZURE + GOOD * 3 + b"2023-11-16 18:15:46.5,ten,2\n" + GOOD, "T, line 5: ContextTokens is not a whole number"),
        (AZURE + GOOD + b"2023-11-16 18:15:46.5,1_0,2\n", "T, line 3: ContextTokens is not a whole number"),
        (AZURE + GOOD + b"2023-11-16 18:15:46.5,10,-2\n", "T, line 3: GeneratedTokens is negative"),
        (AZURE + GOOD + b"2023-11-16 18:15:46.5,10,1000000001\n", "T, line 3: GeneratedTokens is out of range"),
        (AZURE + GOOD + b"2023-11-16 18:15:46.5,10," + b"9" * 5000 + b"\n", "T, line 3: GeneratedTokens is not"),
        (AZURE + GOOD + b"2023-11-31 18:15:46.5,10,2\n", "T, line 3: TIMESTAMP is not a date"),
        (AZURE + GOOD + b"9999-11-16 18:15:46.5,10,2\n", "T, line 3: arrival is out of range"),
        (AZURE + GOOD + b"NaN,10,2\n", "T, line 3: TIMESTAMP is not a date"),
        (AZURE + GOOD + b"\xff\xff,10,2\n", "T, line 3: not text"),
        (AZURE + GOOD + b"10,2\n2023-11-16 18:15:46.5,10,2,4\n", "T, line 3: 2 cells, and the header has 3"),
        (AZURE + GOOD + b'{"timestamp": 0}\n', "T, line 3: 1 cells"),
        (AZURE + GOOD + b'"2023-11-16,10,2\n', "T, line 3: not CSV"),
        (BURST + b"1e999999999,m,1,1,1,x\n", "T, line 2: Timestamp is not a number of seconds"),
        (BURST + b"nan,m,1,1,1,x\n", "T, line 2: Timestamp is not a number of seconds"),
        ((MOONCAKE % (0, 5, 5, "[1]")).encode() + AZURE, "T, line 2: not JSON"),
        ((MOONCAKE % ("true", 5, 5, "[1]")).encode(), "T, line 1: timestamp is not a number"),
        ((MOONCAKE % ("NaN", 5, 5, "[1]")).encode(), "T, line 1: timestamp is out of range"),
        ((MOONCAKE % ("1e300", 5, 5, "[1]")).encode(), "T, line 1: arrival is out of range"),
        ((MOONCAKE % (0, "true", 5, "[1]")).encode(), "T, line 1: input_length is not a whole number"),
        ((MOONCAKE % (0, 5, "5.5", "[1]")).encode(), "T, line 1: output_length is not a whole number"),
        ((MOONCAKE % (0, 5, 10**30, "[1]")).encode(), "T, line 1: output_length is out of range"),
        ((MOONCAKE % (0, 5, 5, "7")).encode(), "T, line 1: hash_ids is not a list"),
        ((MOONCAKE % (0, 5, 5, "[[1]]")).encode(), "T, line 1: hash_ids holds something"),
        ((MOONCAKE % (0, 5, 5, "[true]")).encode(), "T, line 1: hash_ids holds something"),
        *((b"prompt_tokens,output_tokens\n3,4\n%s\n" % row, "T, line 3: ")
          for row in (b"1_00,5", b"1e2,5", b"1.5,5", b"9999999999,5", b"1", b"1,2,3", b"-1,5", b"nan,5")),
        (RECORDED % b'"arrival":"1","output_tokens":1', "T, line 1: arrival is not a number"),
        (RECORDED % b'"arrival":1e99999,"output_tokens":1', "T, line 1: arrival is out of range"),
        (RECORDED % b'"arrival":1', "T, line 1: no output_tokens in it"),
        (RECORDED % b'"arrival":1,"output_tokens":1,"prefix_hashes":["a"],"prefix_block":0', "T, line 1: prefix_block is out"),
        (b"\x1f\x8bx", "T: looks like gzip and is not"),
        (gzip.compress(AZURE + GOOD, mtime=0)[:-9], "T: cut or damaged gzip data"),
        (gzip.compress(AZURE + GOOD, mtime=0) + b"rest", "T: cut or damaged gzip data"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    """Empty, binary, broken, absurd and mixed files: the line, and what is wrong with it; of lengths alone for `plan`, too."""
    assert refusal(tmp_path, content).startswith(said)
    if not any(about in said for about in ("arrival", "imestamp", "TIMESTAMP", "hash_ids", "prefix_block")):
        with pytest.raises(BadInput) as caught:
            read_lengths(str(tmp_path / "t"))
        assert "\n" not in str(caught.value)


def test_who_brings_a_csv_of_his_own_is_told_its_columns(tmp_path: Path) -> None:
    """A file with other names, and one whose times stand under another name: the message has the names that work."""
    wanted = "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert f"the simplest is a CSV with {wanted}" in refusal(tmp_path, b"a,b\n1,2\n")
    said = refusal(tmp_path, b"time,prompt_tokens,completion_tokens\n1,2,3\n")
    assert f"a column arrived_at (seconds), or in the columns {wanted} (dates)" in said


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    """The good rows are those of the file without the bad ones, wherever the bad ones stand."""
    bad = [b"x\n", b"2023-11-16 18:15:46.5,-1,2\n", b"\xff\n"]
    rows = [bad[i % 3] if i % 97 in (0, 1, 50) else b"2023-11-16 18:15:%02d.5,%d,2\n" % (i % 60, i) for i in range(1000)]
    good = [row for row in rows if row not in bad]
    (tmp_path / "mixed").write_bytes(AZURE + b"".join(rows))
    (tmp_path / "good").write_bytes(AZURE + b"".join(good))
    mixed, clean = (read_trace(str(tmp_path / name), skip_bad=True) for name in ("mixed", "good"))
    assert (mixed.bad_rows, clean.bad_rows) == (1000 - len(good), 0)
    assert mixed.prompt.tolist() == clean.prompt.tolist()
    assert "can be read, 2 bad rows" in refusal(tmp_path, AZURE + b"x\ny\n", skip_bad=True)


def test_what_is_not_a_file_is_one_line(tmp_path: Path) -> None:
    """A folder, a pipe nobody writes to, a name that cannot be, nothing at all: none of them waits."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "a\0b"):
        for reader in (read_trace, read_measured, read_timeseries):
            with pytest.raises(BadInput) as caught:
                reader(str(path))
            assert "\n" not in str(caught.value)


def test_endless_lines_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line, a file or a number of rows beyond the limits is TooLarge, also out of a small archive."""
    (tmp_path / "line").write_bytes(gzip.compress(b"x" * (trace_columns.LINE_MAX + 2 * trace_columns.CHUNK)))
    with pytest.raises(TooLarge, match="line 1: longer than 16 MiB"):
        read_trace(str(tmp_path / "line"))
    monkeypatch.setattr(trace_columns, "BYTES_MAX", 3 << 20)
    with pytest.raises(TooLarge, match="of text"):
        read_trace(str(tmp_path / "line"))
    monkeypatch.setattr(trace_columns, "ROWS_MAX", 10)
    (tmp_path / "rows").write_bytes(AZURE + GOOD * 11)
    with pytest.raises(TooLarge, match="more than 10 lines"):
        read_trace(str(tmp_path / "rows"))


@each(
    ("options", "said"),
    [
        ({"limit": 0}, "--limit"),
        ({"prefix_block": 0}, "--trace-block-size"),
        ({"arrivals": Arrivals("poisson")}, "--rate"),
        ({"arrivals": Arrivals("poisson", float("nan"))}, "--rate"),
        ({"arrivals": Arrivals("weekly", 1.0)}, "--arrivals takes"),
        ({"arrivals": Arrivals("bursty", 1.0, burstiness=0.0)}, "--burstiness"),
        ({"arrivals": Arrivals("poisson", 1.0, seed=-1)}, "--seed"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, options: dict[str, object], said: str) -> None:
    """Each by the option's name."""
    assert said in refusal(tmp_path, AZURE + GOOD, **options)


@each("process", ["poisson", "constant", "bursty"])
def test_processes_keep_their_rate_and_their_seed(process: str) -> None:
    """The mean is as asked, the same seed repeats, fewer are a part of more; bursty is burstier than poisson."""
    asked = Arrivals(process, 50.0, seed=4)
    times = arrival_times(asked, 20_000)
    assert times[-1] / 1e9 == pytest.approx(400, rel=0.08)
    assert arrival_times(asked, 20_000).tolist() == times.tolist()
    assert arrival_times(asked, 100).tolist() == times[:100].tolist()
    spread = float(np.diff(times).std() / np.diff(times).mean())
    assert spread == pytest.approx({"poisson": 1, "constant": 0, "bursty": 2}[process], abs=0.1)


def test_a_rate_that_outlives_us_is_refused() -> None:
    """No arrival beyond int64."""
    with pytest.raises(BadInput, match="hundred years"):
        arrival_times(Arrivals("constant", 1e-9), 10)


@each("content", [b"", b"t,x\n", SERIES, SERIES + b"1,2,3,4,5,nan\n", SERIES + b"1,2\n", b"\xff"])
def test_a_broken_time_series_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Empty, other columns, not a number, not text."""
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(BadInput):
        read_timeseries(str(tmp_path / "s"))


WORDS = st.sampled_from(
    [AZURE, BURST, GOOD, SERIES, b"num_prefill_tokens,num_decode_tokens\n", b"1,2\n", b"5,m,1,1,1,x\n", b"\r\n", b'"', b"{",
     b"}", b",", b"NaN",
     (MOONCAKE % (1, 5, 5, "[1]")).encode(), (MOONCAKE % (-1, 0, 0, '["a"]')).encode(), b'{"input_toks": 1, "output_toks": 2, ',
     b'"queued_ts": 1.5, ', b'"arrival_time_ns": 1}\n', b'{"schema": "plimsoll.request/1", "arrival": 1.5, ',
     b'"prompt_tokens": 1, ', b'"output_tokens": 1, ', b'"prefix_hashes": ["a"], "prefix_block": 0}\n',
     b"[" * 3000, b"\x1f\x8b", b"9" * 30, b"-1e999"]
)  # fmt: skip


@given(st.one_of(st.binary(max_size=200), st.lists(WORDS, max_size=12).map(b"".join)), st.booleans(), st.booleans())
def test_any_bytes_are_a_trace_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, skip_bad: bool, packed: bool
) -> None:
    """Nothing but BadInput comes out of hostile bytes, and what comes out as a trace is one."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(gzip.compress(content, 1, mtime=0) if packed else content)
    for arrivals in (None, Arrivals("constant", 1.0)):
        with contextlib.suppress(BadInput):
            trace = read_trace(str(path), skip_bad=skip_bad, arrivals=arrivals)
            assert trace.size > 0
            assert trace.arrival_ns[0] == 0
            assert np.all(np.diff(trace.arrival_ns) >= 0)
            assert trace.prompt.min() >= 1
            assert trace.output.min() >= 1
            assert trace.prefix_start[-1] == len(trace.prefix_ids)
    for reader in (read_measured, read_timeseries, read_lengths):
        with contextlib.suppress(BadInput):
            reader(str(path))


def test_the_recorders_folder_is_one_trace(tmp_path: Path) -> None:
    """All its files by arrival, without a line that is still being written; one without a recording is said."""
    line = '{"schema": "plimsoll.request/1", "arrival": %d, "prompt_tokens": 8, "output_tokens": 2}'
    (tmp_path / "requests-20260102T000000Z-7.jsonl").write_text(
        line % 30 + "\n" + line % 20 + "\n" + '{"schema": "pl', encoding="utf-8"
    )
    (tmp_path / "requests-20260101T000000Z-7.jsonl").write_text(line % 10 + "\n", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not a trace", encoding="utf-8")
    assert read_trace(str(tmp_path)).arrival_ns.tolist() == [0, 10**10, 2 * 10**10]
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"requests-\*.jsonl"):
        read_trace(str(tmp_path / "empty"))
