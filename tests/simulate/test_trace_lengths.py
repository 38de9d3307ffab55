"""Lengths of requests out of trace files."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.simulate.trace_files import read_lengths, read_trace


def test_azure_and_mooncake_are_read_plain_and_packed(tmp_path: Path) -> None:
    """The two public formats give the same pairs, gzipped or not."""
    csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n"
    lines = '{"timestamp": 0, "input_length": 374, "output_length": 44}\n{"input_length": 396, "output_length": 109}\n'
    for name, text in (("a.csv", csv), ("m.jsonl", lines)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert read_lengths(str(tmp_path / name)) == read_lengths(str(tmp_path / f"{name}.gz")) == [(374, 44), (396, 109)]


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Timestamp,Model,Request tokens,Response tokens\n5,A,472,18\n9,A,10,0\n45,B,1087,230\n", [(472, 18), (1087, 230)]),
        ("arrived_at,input_tokens,output_tokens\n0,12,3\n1,5.0,0\n", [(12, 3), (5, 1)]),
        ('\ufeff"TimeStamp","contexttokens","GENERATEDTOKENS"\r\n"2023-11-16 18:15:46","374","44"\r\n', [(374, 44)]),
        ('{"schema": "plimsoll.request/1", "arrival": 0.5, "prompt_tokens": 7, "output_tokens": 9}\n', [(7, 9)]),
    ],
    ids=["BurstGPT with a failed request", "lengths", "other case, quotes and Windows' line ends", "our recording"],
)
def test_a_file_that_simulate_takes_gives_the_same_lengths(tmp_path: Path, text: str, pairs: list[tuple[int, int]]) -> None:
    """The columns go by the same names for `plan --workload` as for `simulate`, and a failed request is none for both."""
    (tmp_path / "t").write_text(text, encoding="utf-8")
    trace = read_trace(str(tmp_path / "t"))
    assert read_lengths(str(tmp_path / "t")) == pairs
    assert list(zip(trace.prompt.tolist(), trace.output.tolist(), strict=True)) == pairs


@pytest.mark.parametrize("row", ["1_00,5", "1e2,5", "1.5,5", "9999999999,5", "1", "1,2,3", "-1,5", "nan,5"])
def test_a_row_that_simulate_refuses_is_refused(tmp_path: Path, row: str) -> None:
    """Neither reader takes a number that is not whole, or a row of another width; the line is named."""
    (tmp_path / "t.csv").write_text(f"prompt_tokens,output_tokens\n3,4\n{row}\n", encoding="utf-8")
    for read in (read_lengths, read_trace):
        with pytest.raises(BadInput, match=r"t\.csv, line 3: "):
            read(str(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    "content", [b"", b"a,b\n1,2\n", b"{bad\n", b"\xff\xfe\x00", b'{"input_length": -1, "output_length": 2}\n', b"\x1f\x8bx"]
)
def test_what_is_no_trace_is_one_line(content: bytes, tmp_path: Path) -> None:
    """Empty, other columns, broken JSON, binary, negative, a broken archive."""
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_lengths(str(tmp_path / "t"))
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Nothing but BadInput comes out of hostile bytes."""
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(content)
    with contextlib.suppress(BadInput):
        assert read_lengths(str(path))
