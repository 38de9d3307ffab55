"""What reading a safetensors header promises, whoever wrote the file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.models.safetensors import (
    BITS,
    SHARDS_MAX,
    Header,
    TensorInfo,
    header_length,
    join_headers,
    parse_header,
    read_header,
)
from tests.each import cases


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor as the format writes it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: object, data_bytes: int) -> bytes:
    """A whole file with that header and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * data_bytes


def read(tmp_path: Path, content: bytes) -> Header:
    """The header of a file with that content."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return read_header(path)


def test_names_types_and_shapes_are_read_and_the_data_is_not(tmp_path: Path) -> None:
    """A sparse file of 40 GB takes no longer than its header, and every tensor is there with its size."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("BF16", [2, 3], 0, 12),
        "big": entry("U8", [40 * 10**9], 12, 40 * 10**9 + 12),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, 0))
    os.truncate(path, path.stat().st_size + 40 * 10**9 + 12)
    found = read_header(path)
    assert found.tensors == (TensorInfo("a", "BF16", (2, 3)), TensorInfo("big", "U8", (40 * 10**9,)))
    assert found.data_bytes == 40 * 10**9 + 12


def test_the_size_follows_from_type_and_shape(tmp_path: Path) -> None:
    """Bits are rounded up to bytes, a scalar has one element; a type newer than our table has the bytes of its offsets."""
    sizes = {"BF16": ([2, 3], 12), "F8_E4M3": ([7], 7), "F4": ([3], 2), "I64": ([], 8), "F32": ([0, 5], 0), "F2_NEW": ([8], 2)}
    for dtype, (shape, size) in sizes.items():
        assert read(tmp_path, file_of({"t": entry(dtype, shape, 0, size)}, size)).data_bytes == size
        if dtype != "F2_NEW":
            with pytest.raises(BadInput, match=f"need {size}"):
                read(tmp_path, file_of({"t": entry(dtype, shape, 0, size + 1)}, size + 1))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((file_of(header, size), says) for header, size, says in cases("models", "a_broken_header_is_one_line")),
        (b"", "only 0 bytes long"),
        (b"\x05\0\0", "only 3 bytes long"),
        ((10**12).to_bytes(8, "little") + b"{}", "header would be 1,000,000,000,000 bytes"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "header would be"),
        ((50).to_bytes(8, "little") + b"{}", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (file_of(b"not json", 0), "no JSON object"),
        (file_of(b"\xff\xfe{}", 0), "no JSON object"),
        (file_of(b"[]", 0), "no JSON object"),
        (file_of(b"[" * 100_000, 0), "no JSON object"),
        (file_of(b'{"a":1' + b"0" * 5000 + b"}", 0), "tensor 'a'"),
        (file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0), "`dtype`"),
        (file_of({"x" * 5000: entry("U8", [0], 0, 0)}, 0), "5,000 characters"),
    ],
)
def test_a_broken_header_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    """Whatever is wrong with a file, the message names the file and what is wrong."""
    with pytest.raises(BadInput) as caught:
        read(tmp_path, content)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_not_a_plain_file_is_refused(tmp_path: Path) -> None:
    """A folder, a named pipe without a writer and a symlink to itself are refused at once."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in (".", "pipe", "loop", "absent"):
        with pytest.raises(BadInput):
            read_header(tmp_path / name)


def test_shards_are_joined_and_must_not_share_a_tensor() -> None:
    """The sizes add up; the same name in two shards is an error, and so are thousands of shards."""
    one, two = Header((TensorInfo("a", "U8", (1,)),), 1), Header((TensorInfo("b", "U8", (2,)),), 2)
    assert join_headers([("1", one), ("2", two)]) == Header((one.tensors[0], two.tensors[0]), 3)
    with pytest.raises(BadInput, match="'a' is also in another shard"):
        join_headers([("1", one), ("2", one)])
    with pytest.raises(TooLarge, match="shards"):
        join_headers((str(n), Header((), 0)) for n in range(SHARDS_MAX + 1))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["dtype", "shape", "data_offsets"]), inner),
    max_leaves=20,
)


@given(st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()), st.integers(0, 1000))
def test_no_header_whatever_causes_anything_but_bad_input(content: bytes, data_bytes: int) -> None:
    """Any bytes give tensors that fill the file exactly, or BadInput."""
    try:
        found = parse_header(content, data_bytes, "f")
    except BadInput as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert found.data_bytes == data_bytes


@given(st.binary(max_size=16), st.integers(0, 2**63))
def test_no_length_leads_beyond_the_file(prefix: bytes, file_bytes: int) -> None:
    """A length is only ever one that fits in the file and the format."""
    try:
        assert 2 <= header_length(prefix, file_bytes, "f") <= min(file_bytes - 8, 100_000_000)
    except BadInput as error:
        assert "\n" not in str(error)  # noqa: PT017


@given(
    st.lists(st.tuples(st.sampled_from(["BF16", "F32", "U8", "F8_E4M3"]), st.lists(st.integers(0, 9), max_size=4)), max_size=9)
)
def test_what_is_written_is_read_back(described: list[tuple[str, list[int]]]) -> None:
    """A well-formed header comes back tensor by tensor, in any order of the data."""
    header: dict[str, Any] = {}
    reached = 0
    for number, (dtype, shape) in enumerate(described):
        size = math.prod(shape) * BITS[dtype] // 8
        header[f"t{number}"] = entry(dtype, shape, reached, reached + size)
        reached += size
    found = parse_header(json.dumps(header).encode(), reached, "f")
    assert [(t.dtype, list(t.shape)) for t in found.tensors] == described
    assert found.data_bytes == reached
