"""Reads a safetensors file's header: names, types and shapes of its tensors, never a byte of their data.

    | 8 bytes: length of the header, little-endian | header: JSON | data: every byte belongs to one tensor |

The header comes from whoever published the model, so everything in it is checked against the size of the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from plimsoll.errors import BadInput, TooLarge

HEADER_MAX_BYTES = 100_000_000  # the format's own limit
TENSORS_MAX = 1_000_000  # the largest models of 2026 have a third of that
SHARDS_MAX = 2_000
PREFIX_BYTES = 8

_NAME_MAX = 1_024
BITS = {  # a type that is missing here is newer than this table
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Tensor(msgspec.Struct):
    """One tensor as the header has it."""

    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 50)], ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], int]


_read_tensor = msgspec.json.Decoder(_Tensor).decode


class Header(NamedTuple):
    """The tensors of one file and the bytes they take."""

    tensors: tuple[TensorInfo, ...]
    data_bytes: int


def join_headers(headers: Iterable[tuple[str, Header]]) -> Header:
    """Several shards as one; BadInput where a tensor is in two of them, or where there are too many."""
    found: dict[str, TensorInfo] = {}
    total = 0
    for count, (where, header) in enumerate(headers, start=1):
        if count > SHARDS_MAX:
            raise TooLarge(f"{where}: one of more than {SHARDS_MAX:,} shards, which no model has")
        for tensor in header.tensors:
            if tensor.name in found:
                raise BadInput(f"{where}: tensor {_shown(tensor.name)} is also in another shard")
            found[tensor.name] = tensor
        if len(found) > TENSORS_MAX:
            raise TooLarge(f"{where}: more than {TENSORS_MAX:,} tensors, which no model has")
        total += header.data_bytes
    return Header(tuple(found.values()), total)


def open_plain(path: Path) -> BinaryIO:
    """Opens a regular file for reading; BadInput where the path is anything else."""
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    os.close(descriptor)
    raise BadInput(f"{path}: not a regular file")


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file, up to one byte more than the most it may have; BadInput where it cannot be read."""
    with open_plain(path) as file:
        try:
            return file.read(most_bytes + 1)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None


def replace_file(path: Path, text: str) -> None:
    """Writes a file of ours whole or not at all, in a folder that only the user may enter; OSError where that fails."""
    import tempfile  # only where something is kept

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_header(path: Path) -> Header:
    """The header of one file on disk; BadInput says what is wrong with a broken one."""
    where = str(path)
    with open_plain(path) as file:
        try:
            file_bytes = os.fstat(file.fileno()).st_size
            length = header_length(file.read(PREFIX_BYTES), file_bytes, where)
            content = file.read(length)
        except OSError as error:
            raise BadInput(f"{where}: cannot be read: {error.strerror or error}") from None
    return parse_header(content, file_bytes - PREFIX_BYTES - length, where)


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """The header's length, from the first eight bytes of a file of `file_bytes`."""
    if len(prefix) != PREFIX_BYTES:
        hint = "; a Git LFS pointer?" if prefix.startswith(b"versi") else ""
        raise BadInput(f"{where}: not a safetensors file: only {len(prefix)} bytes long{hint}")
    if prefix == b"version ":
        raise BadInput(f"{where}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_MAX_BYTES or length < 2:
        raise BadInput(f"{where}: not a safetensors file: its header would be {length:,} bytes long")
    if length > file_bytes - PREFIX_BYTES:
        raise BadInput(
            f"{where}: cut short: the header alone needs {length + PREFIX_BYTES:,} bytes, the file has {file_bytes:,}"
        )
    return length


def parse_header(content: bytes, data_bytes: int, where: str) -> Header:
    """The tensors of a header; BadInput unless their data fill the rest of the file without gap or overlap."""
    try:
        entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not a safetensors file: its header is no JSON object: {error}") from None
    entries.pop("__metadata__", None)
    if len(entries) > TENSORS_MAX:
        raise TooLarge(f"{where}: more than {TENSORS_MAX:,} tensors, which no model has")
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # thousands of experts share a few shapes
    found: list[tuple[int, int, TensorInfo]] = []
    for name, raw in entries.items():
        if len(name) > _NAME_MAX:
            raise BadInput(f"{where}: a tensor's name is {len(name):,} characters long")
        try:
            tensor = _read_tensor(raw)
        except ValueError as error:
            raise BadInput(f"{where}: tensor {_shown(name)}: {error}") from None
        (begin, end), shape = tensor.data_offsets, shapes.setdefault(tensor.shape, tensor.shape)
        size = (prod(shape) * BITS[tensor.dtype] + 7) // 8 if tensor.dtype in BITS else None  # up: half a byte is a byte
        if size is not None and size != end - begin:
            raise BadInput(f"{where}: tensor {_shown(name)} takes {end - begin:,} bytes, its type and shape need {size:,}")
        found.append((begin, end, TensorInfo(name, tensor.dtype, shape)))
    reached = 0
    for begin, end, info in sorted(found):
        if begin != reached or end < begin:
            what = "leaves a gap before it" if begin > reached else "overlaps the one before it"
            raise BadInput(f"{where}: the data of tensor {_shown(info.name)} {what}")
        reached = end
    if reached != data_bytes:
        raise BadInput(
            f"{where}: cut short or damaged: the header describes {reached:,} bytes of data, there are {data_bytes:,}"
        )
    return Header(tuple(info for _, _, info in found), reached)


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:77] + "...")
