"""The corrections file as it is read: nothing there is nothing known, and nothing odd gets through."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.plan.learned import FILE_MAX_BYTES, Correction, Learned, Start, decoded, encoded
from plimsoll.plan.read import read_corrections

KEY = "vllm=0.32.0;gpu=l4;model=aa;tp=1;pp=1;run=bb"


def _file(corrections: object, version: int = 1) -> str:
    return json.dumps({"schema": f"plimsoll.corrections/{version}", "corrections": corrections})


def test_no_file_is_no_correction(tmp_path: Path) -> None:
    """A first plan finds nothing, and says nothing."""
    assert read_corrections(tmp_path / "corrections.json") == {}
    assert read_corrections(tmp_path / "no" / "such" / "corrections.json") == {}


@pytest.mark.parametrize(
    "corrections",
    [
        [],
        {KEY: []},
        {KEY: {"starts": 1}},
        {KEY: [[1, 1, {}]]},
        {KEY: [[1, 1, 1, {"weights": [1, 2]}]]},
        {KEY: [[1, 1, 1, {"weights": [1, -2, 3]}]]},
        {KEY: [[1, 1, 1, {"weights": [1, 2.5, 3]}]]},
        {KEY: [[1, 1, 1, {"weights": [True, 2, 3]}]]},
        {KEY: [[1, 1, 1, {"weights": [1, 10**30, 3]}]]},
        {KEY: [[1, 1, 1, {}]] * 17},
        {"../etc/passwd": [[1, 1, 1, {}]]},
        {"A" * 300: [[1, 1, 1, {}]]},
    ],
)
def test_anything_that_makes_no_sense_is_one_line(tmp_path: Path, corrections: Any) -> None:
    """A damaged file is named, and no part of it is used."""
    path = tmp_path / "corrections.json"
    path.write_text(_file(corrections), encoding="utf-8")
    with pytest.raises(BadInput, match=r"corrections\.json: not a corrections file") as refusal:
        read_corrections(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"schema": 1}', b"null"])
def test_hostile_bytes(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no text, endless nesting and not-a-number are a damaged file, not a traceback."""
    path = tmp_path / "corrections.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="damaged"):
        read_corrections(path)


def test_a_newer_plimsolls_file(tmp_path: Path) -> None:
    """The line says that it is newer, not that it is broken."""
    path = tmp_path / "corrections.json"
    path.write_text(_file({}, 7), encoding="utf-8")
    with pytest.raises(BadInput, match="newer plimsoll"):
        read_corrections(path)


def test_a_pipe_a_folder_and_a_file_without_end(tmp_path: Path) -> None:
    """What is no plain file is refused without waiting, and a huge one without being read whole."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="not a regular file"):
        read_corrections(tmp_path / "pipe")
    with pytest.raises(BadInput):
        read_corrections(tmp_path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(FILE_MAX_BYTES * 100)
    with pytest.raises(BadInput, match="damaged"):
        read_corrections(tmp_path / "huge")


_sizes = st.integers(0, 1 << 50)


@given(st.dictionaries(st.sampled_from(["weights", "remainder", "context"]), st.tuples(_sizes, _sizes, _sizes)), _sizes)
def test_encoding_is_undone_by_decoding(terms: dict[str, tuple[int, int, int]], limit: int) -> None:
    """Every correction comes back as it was."""
    start = Start(limit, limit, limit, {name: Learned(*term) for name, term in terms.items()})
    known = {KEY: Correction((start,))}
    assert decoded(encoded(known).encode(), "f") == known
