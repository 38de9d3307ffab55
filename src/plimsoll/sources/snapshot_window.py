"""A moving window over a file of unknown length: what was read is dropped, what is next is there."""

from __future__ import annotations

from typing import Protocol

from plimsoll.errors import BadInput, TooLarge

SIZE_MAX = 4 << 30
CHUNK = 1 << 20
MARGIN = 300  # no opcode of fixed size, with its short text, is longer


class Source(Protocol):
    """Whatever bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


class Window:
    """The bytes around the place that is being read."""

    def __init__(self, source: Source, name: str) -> None:
        self.name = name
        self.bytes = b""
        self._source = source
        self._read = 0
        self._is_at_end = False

    @property
    def last(self) -> int:
        """The last place from which an opcode can be read without asking for more."""
        return len(self.bytes) - (0 if self._is_at_end else MARGIN)

    def offset(self, at: int) -> int:
        """Where in the file a place of the window is."""
        return self._read - len(self.bytes) + at

    def moved(self, at: int, wanted: int = CHUNK) -> int:
        """Read so many bytes more, or all there are; what lies before `at` is dropped. Gives the new place of `at`."""
        if self._is_at_end:
            return at
        pieces, got = [self.bytes[at:]], 0
        while got < wanted:
            piece = self._source.read(min(CHUNK, wanted - got))
            if not piece:
                self._is_at_end = True
                break
            pieces.append(piece)
            got += len(piece)
        self._read += got
        if self._read > SIZE_MAX:
            raise TooLarge(f"{self.name}: more than {SIZE_MAX >> 30} GiB")
        self.bytes = b"".join(pieces)
        return 0

    def taken(self, at: int, size: int) -> tuple[bytes, int]:
        """So many bytes from `at` on, and the place behind them; a length that lies reserves nothing."""
        if size > SIZE_MAX:
            raise BadInput(f"{self.name}: a damaged pickle: a piece of {size} bytes")
        if at + size > self.last:
            at = self.moved(at, size + CHUNK)
        if at + size > len(self.bytes):
            raise IndexError
        return self.bytes[at : at + size], at + size
