"""Unpacks zstd with whichever library is there: the zstandard package, or Python's own from 3.14."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from plimsoll.errors import BadInput

_BLOCK_BYTES = 1 << 20


class _Reader(Protocol):
    def read(self, size: int) -> bytes: ...


class _Library(Protocol):
    """What is used of either library: they agree on nothing but the idea."""

    ZstdError: type[Exception]

    def ZstdDecompressor(self) -> object: ...  # noqa: N802


class _Pull:
    """Blocks as a file that can only be read forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """At most this many bytes; empty at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return b""
            self._rest = block
        wanted = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(wanted) :]
        return wanted


def _library() -> tuple[_Library, bool] | None:
    """The library, and whether it is the package."""
    for name in ("zstandard", "compression.zstd"):
        try:
            return cast("_Library", importlib.import_module(name)), name == "zstandard"
        except ImportError:
            continue
    return None


def unpacked_zstd(source: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The text of every frame; where the data is cut or spoilt, what came before."""
    found = _library()
    if found is None:
        raise BadInput(f"{source}: packed with zstd; install the zstandard package (pip install zstandard) or unpack it first")
    library, is_package = found
    came = False
    try:
        for text in _by_package(library, blocks) if is_package else _by_python(library, blocks):
            came = True
            yield text
    except (library.ZstdError, EOFError):
        if not came:
            raise BadInput(f"{source}: looks like zstd and is not") from None


def _by_package(library: _Library, blocks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = library.ZstdDecompressor()
    reader = cast("_Reader", unpack.stream_reader(_Pull(blocks), read_size=64 << 10, read_across_frames=True))  # type: ignore[attr-defined]
    while text := reader.read(_BLOCK_BYTES):
        yield text


def _by_python(library: _Library, blocks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = library.ZstdDecompressor()
    for block in blocks:
        data = block
        while True:
            if text := unpack.decompress(data, max_length=_BLOCK_BYTES):  # type: ignore[attr-defined]
                yield text
            if unpack.eof:  # type: ignore[attr-defined]
                data = unpack.unused_data  # type: ignore[attr-defined]
                unpack = library.ZstdDecompressor()
                if not data:
                    break
            elif unpack.needs_input:  # type: ignore[attr-defined]
                break
            else:
                data = b""
