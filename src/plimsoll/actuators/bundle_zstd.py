"""zstd by whichever library is there: the zstandard package, or Python's own from 3.14."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import IO, Protocol, cast

from plimsoll.errors import BadInput

_BLOCK_BYTES = 1 << 20
_LEVEL = 10
_PIECE_BYTES = 256  # four bytes may unpack to 128 KiB: so much of it at a time stays small


class _Unpacker(Protocol):
    """What both libraries' unpackers have in common."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes) -> bytes: ...


def library() -> tuple[ModuleType, bool] | None:
    """The library, and whether it is the package."""
    for name in ("zstandard", "compression.zstd"):
        try:
            return importlib.import_module(name), name == "zstandard"
        except ImportError:
            continue
    return None


def packing(target: IO[bytes]) -> IO[bytes]:
    """A stream that packs what is written to it; closing it leaves the target open."""
    found = library()
    if found is None:
        raise BadInput("a .tar.zst needs the zstandard package: name it .tar.gz, or install plimsoll-line[doctor]")
    module, is_package = found
    if is_package:
        return cast("IO[bytes]", module.ZstdCompressor(level=_LEVEL).stream_writer(target, closefd=False))
    return cast("IO[bytes]", module.ZstdFile(target, "w", level=_LEVEL))


def unpacked_zstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The text of every frame; where the data is cut or spoilt, what came before."""
    found = library()
    if found is None:
        raise BadInput("packed with zstd, and the zstandard package is not installed")
    module, is_package = found
    unpack: _Unpacker | None = None
    for block in blocks:
        for at in range(0, len(block), _PIECE_BYTES):
            data = block[at : at + _PIECE_BYTES]
            while data:
                if unpack is None:
                    made = module.ZstdDecompressor()
                    unpack = cast("_Unpacker", made.decompressobj() if is_package else made)
                try:
                    text = unpack.decompress(data)
                except (module.ZstdError, EOFError):
                    return
                for start in range(0, len(text), _BLOCK_BYTES):
                    yield text[start : start + _BLOCK_BYTES]
                data = unpack.unused_data if unpack.eof else b""
                unpack = None if unpack.eof else unpack
