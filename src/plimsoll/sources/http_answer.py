"""Reads one answer of HTTP/1.1 from bytes as they come. No sockets: what was received goes in, the body goes on in pieces.

Everything has a limit: the head, the body, the body unpacked, the number of chunks. Whatever is against the rules is refused
at once, and nothing is kept that has been handed on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from plimsoll.domain.look import Reach
from plimsoll.errors import WorldFailed

HEAD_MAX = 32 << 10
HEADERS_MAX = 200
CHUNKS_MAX = 65_536
CHUNK_LINE_MAX = 1_024
INTERIM_MAX = 4  # answers that are none yet: 100, 103
PIECE = 64 << 10
CHUNKED_PIECE = 16 << 10
Sink = Callable[[bytes], None]


class Missed(WorldFailed):
    """There is no answer, or none to be believed. `reach` says which; `was_sent` and `was_begun` how far it came.

    `why` is what the server does, in words that go on from its name: "did not answer within 3 s".
    """

    def __init__(self, reach: Reach, why: str, *, was_sent: bool = False, was_begun: bool = False) -> None:
        super().__init__(why)
        self.reach, self.why, self.was_sent, self.was_begun = reach, why, was_sent, was_begun


class Late(Missed):
    """The deadline has passed."""


def nonsense(why: str) -> Missed:
    """What came is no answer."""
    return Missed(Reach.NONSENSE, why, was_sent=True, was_begun=True)


class AnswerReader:
    """One answer. `feed` what was received, then look whether it `is_complete`; `end` when the connection was closed."""

    def __init__(self, most_bytes: int, sink: Sink) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.is_complete = False
        self.is_begun = False
        self.can_stay = False  # whether the connection may be used again
        self._most, self._sink = most_bytes, sink
        self._read: Callable[[bytes], bytes] = self._read_head
        self._held = b""
        self._missing = 0  # of the body, or of the chunk
        self._received = self._handed = self._chunks = self._interim = 0
        self._unpacker: zlib._Decompress | None = None
        self._lasts_until_close = False

    def feed(self, data: bytes) -> None:
        """What was received; raises Missed when it cannot be an answer."""
        self.is_begun = self.is_begun or bool(data)
        at, piece = 0, b""
        while at < len(data) and not self.is_complete:
            # Chunks are cut off the front one by one: small pieces, so that little is copied each time.
            size = len(data) if self._read in (self._read_body, self._read_until_close) else CHUNKED_PIECE
            piece = data[at : at + size]
            at += len(piece)
            while piece and not self.is_complete:
                piece = self._read(piece)
        if piece or at < len(data):  # more than was asked for: whose answer that is, nobody knows
            self.can_stay = False

    def end(self) -> None:
        """The other side has closed; raises Missed if something is missing."""
        self.can_stay = False
        if self.is_complete:
            return
        if not self._lasts_until_close:
            raise nonsense("answers with something that is cut off" if self.is_begun else "hung up without an answer")
        self._finish()

    # The head

    def _read_head(self, data: bytes) -> bytes:
        before = len(self._held)
        self._held += data
        end = self._held.find(b"\r\n\r\n", max(0, before - 3))
        if not self._held.startswith(b"HTTP/1."[: len(self._held)]):
            raise nonsense("answers with something that is not HTTP")
        if end < 0 or end > HEAD_MAX:
            if len(self._held) > HEAD_MAX:
                raise nonsense("answers with a head that does not end")
            return b""
        head, rest = self._held[:end], self._held[end + 4 :]
        self._held = b""
        self._take_head(head.decode("latin-1").split("\r\n"))
        return rest

    def _take_head(self, lines: list[str]) -> None:
        version, _, status = lines[0].partition(" ")
        status = status.partition(" ")[0]
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(status) != 3 or not (status.isascii() and status.isdigit()):
            raise nonsense("answers with something that is not HTTP")
        self.status = int(status)
        if 100 <= self.status < 200 and self.status != 101:
            self._interim += 1
            if self._interim > INTERIM_MAX:
                raise nonsense("never gets to its answer")
            return
        if not 200 <= self.status < 600:
            raise nonsense(f"answers with the status {self.status}")
        if len(lines) > HEADERS_MAX:
            raise nonsense("answers with too many headers")
        self.headers = _headers(lines[1:])
        wants_close = "close" in self.headers.get("connection", "").lower()
        self.can_stay = version == "HTTP/1.1" and not wants_close
        self._choose_body()

    def _choose_body(self) -> None:
        length, coding = self.headers.get("content-length"), self.headers.get("transfer-encoding", "").strip().lower()
        packing = self.headers.get("content-encoding", "identity").strip().lower()
        if packing in ("gzip", "x-gzip"):
            self._unpacker = zlib.decompressobj(wbits=31)
        elif packing not in ("identity", ""):
            raise nonsense("packs its answer in a way that was not asked for")
        if coding:
            if coding != "chunked" or length is not None:
                raise nonsense("says two things about the length of its answer")
            self._read = self._read_chunk_line
        elif length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                raise nonsense("gives its answer no sensible length")
            self._missing = int(length)
            self._check_size(self._missing)
            self._read = self._read_body
        else:
            self._lasts_until_close = True
            self.can_stay = False
            self._read = self._read_until_close
        if self.status in (204, 304) or (length is not None and self._missing == 0):
            self._finish()

    # The body

    def _read_body(self, data: bytes) -> bytes:
        piece, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(piece)
        self._hand(piece)
        if self._missing == 0:
            self._finish()
        return rest

    def _read_until_close(self, data: bytes) -> bytes:
        self._hand(data)
        return b""

    def _line(self, data: bytes) -> tuple[bytes | None, bytes]:
        """The next whole line, and what follows it."""
        self._held += data
        end = self._held.find(b"\r\n")
        if end < 0 or end > CHUNK_LINE_MAX:
            if len(self._held) > CHUNK_LINE_MAX:
                raise nonsense("answers in chunks that make no sense")
            return None, b""
        line, rest = self._held[:end], self._held[end + 2 :]
        self._held = b""
        return line, rest

    def _read_chunk_line(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        if line is None:
            return rest
        size = line.partition(b";")[0].strip()
        self._chunks += 1
        if not 0 < len(size) <= 8 or any(letter not in b"0123456789abcdefABCDEF" for letter in size):
            raise nonsense("answers in chunks that make no sense")
        if self._chunks > CHUNKS_MAX:
            raise nonsense("answers in too many chunks")
        self._missing = int(size, 16)
        self._check_size(self._received + self._missing)
        self._read = self._read_chunk if self._missing else self._read_trailer
        return rest

    def _read_chunk(self, data: bytes) -> bytes:
        piece, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(piece)
        self._hand(piece)
        if self._missing == 0:
            self._read = self._read_chunk_end
        return rest

    def _read_chunk_end(self, data: bytes) -> bytes:
        missing = 2 - len(self._held)
        self._held += data[:missing]
        if not b"\r\n".startswith(self._held):
            raise nonsense("answers in chunks that make no sense")
        if len(self._held) == 2:
            self._held = b""
            self._read = self._read_chunk_line
        return data[missing:]

    def _read_trailer(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        self._chunks += 1
        if self._chunks > CHUNKS_MAX:
            raise nonsense("answers without an end")
        if line == b"":
            self._finish()
        return rest

    def _hand(self, piece: bytes) -> None:
        self._received += len(piece)
        self._check_size(self._received)
        if self._unpacker is None:
            self._sink(piece)
            return
        try:
            while not self._unpacker.eof:
                unpacked = self._unpacker.decompress(piece, PIECE)
                piece = self._unpacker.unconsumed_tail
                self._handed += len(unpacked)
                self._check_size(self._handed)
                if unpacked:
                    self._sink(unpacked)
                if not piece and len(unpacked) < PIECE:
                    break
        except zlib.error:
            raise nonsense("answers with something that cannot be unpacked") from None

    def _finish(self) -> None:
        if self._unpacker is not None and self._received and not self._unpacker.eof:
            raise nonsense("answers with something that is cut off")
        self.is_complete = True

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise nonsense(f"answers with more than {self._most:,} bytes")


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise nonsense("answers with a head that makes no sense")
        if name in ("content-length", "transfer-encoding") and found.get(name, value) != value:
            raise nonsense("says two things about the length of its answer")
        found[name] = value
    return found
