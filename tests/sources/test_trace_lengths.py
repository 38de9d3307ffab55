"""Lengths of requests out of trace files."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.sources.trace_lengths import read_lengths


def test_azure_and_mooncake_are_read_plain_and_packed(tmp_path: Path) -> None:
    """The two public formats give the same pairs, gzipped or not."""
    csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n"
    lines = '{"timestamp": 0, "input_length": 374, "output_length": 44}\n{"input_length": 396, "output_length": 109}\n'
    for name, text in (("a.csv", csv), ("m.jsonl", lines)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert read_lengths(str(tmp_path / name)) == read_lengths(str(tmp_path / f"{name}.gz")) == [(374, 44), (396, 109)]


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
@settings(max_examples=150)
def test_any_bytes_are_a_trace_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Nothing but BadInput comes out of hostile bytes."""
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(content)
    with contextlib.suppress(BadInput):
        assert read_lengths(str(path))
