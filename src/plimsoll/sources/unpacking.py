"""Unpacks gzip of a kind nobody vouches for, up to a size."""

from __future__ import annotations

from plimsoll.errors import BadInput, TooLarge


def gunzipped(data: bytes, most_bytes: int, shown: str) -> bytes:
    """The data itself, or what is in it if it is gzip, never more than `most_bytes`."""
    if data[:2] == b"\x1f\x8b":
        import zlib

        unpacker = zlib.decompressobj(31)
        try:
            data = unpacker.decompress(data, most_bytes + 1)
        except zlib.error:
            raise BadInput(f"{shown}: the gzip data is broken") from None
    if len(data) > most_bytes:
        raise TooLarge(f"{shown}: more than {most_bytes >> 20} MiB")
    return data
