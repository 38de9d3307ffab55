"""A text that comes in blocks of bytes: unpacked, and from another encoding, never more than a block at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

BLOCK_BYTES = 1 << 20


def recoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The same text as UTF-8; what is no letter in this encoding is replaced."""
    import codecs

    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")


def gunzipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Every member's text; where the data is cut or spoilt, what came before, and zlib's error where nothing did."""
    unpack = zlib.decompressobj(31)
    came, is_inside = False, True
    for block in blocks:
        data = block
        while data := data if is_inside else data.lstrip(b"\0"):  # tapes and disks fill up with zeros behind a member
            is_inside = True
            try:
                text = unpack.decompress(data, BLOCK_BYTES)
            except zlib.error:
                if not came:
                    raise
                return
            if text:
                came = True
                yield text
            data = unpack.unconsumed_tail
            if unpack.eof:
                data, is_inside = unpack.unused_data, False
                unpack = zlib.decompressobj(31)
