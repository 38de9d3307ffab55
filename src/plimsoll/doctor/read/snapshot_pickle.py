"""Reads a pickle of plain data without Python's unpickler: what is not a container, a number or text is refused.

Nothing can run, because nothing here looks up a name or calls what it read. Sharing is kept (pickle writes a repeated
object once), so a small file cannot grow by repetition; what the file costs in memory is counted while it is read.
Python's own unpickler, made strict, would run nothing either, but one opcode of five bytes makes it reserve gigabytes
for its memo, and it holds the whole tree at once. Here frames, equal stacks and events that nobody asks for are folded
the moment they are complete; a snapshot with history hardly consists of anything else.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from plimsoll.doctor.rules.snapshot_facts import StackFrame
from plimsoll.errors import BadInput, TooLarge

# A snapshot with history is little else than events, nearly all written alike. The first event of a kind is read opcode by
# opcode and kept as a pattern, in which only numbers and frames may differ; an event that fits it means the same.
_PAIRS_MAX = 24
_ATTEMPTS_MAX = 200  # patterns cost time to make: a file with ever new ones is read without them
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x01.|\x02.{2}|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_NUMBER_SIZES = {0x4B: 1, 0x4D: 2, 0x4A: 4}
RUN = rb"((?:j....|h.){1,999})e"  # a list of things met before, to its end; pickle fills longer ones in batches
_FRAMES = rb"(?:\]\x94\(" + RUN + rb"|(h.|j....)|\]\x94)u"


class EventShape(NamedTuple):
    """How one kind of event is written."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    made: tuple[str | None, ...]  # what the memo gets before the frames: the event itself, then its texts


class EventShapes:
    """The kinds of events that were met so far, by their first bytes."""

    def __init__(self, memo: list[object], text: Callable[[bytes], str]) -> None:
        self.known: dict[bytes, EventShape] = {}
        self.width = 0  # of the name `action` and its value, which come first
        self._memo, self._text = memo, text
        self._attempts = 0

    def learn(self, code: bytes, at: int) -> None:
        """Keep the shape of the event that begins at this place, if it is one that is not kept."""
        if self._attempts >= _ATTEMPTS_MAX or code[at : at + 3] != b"}\x94(":
            return
        try:
            if code[at + 3] not in b"hj" or self._referred(code, at + 3)[0] != "action":
                return
            self._attempts += 1
            self._learn(code, at)
        except IndexError:
            return  # cut short here, or damaged: the reader will see

    def _referred(self, code: bytes, at: int) -> tuple[object, int]:
        """The object of a reference, and the place behind it."""
        if code[at] == 0x68:
            return self._memo[code[at + 1]], at + 2
        return self._memo[int.from_bytes(code[at + 1 : at + 5], "little")], at + 5

    def _learn(self, code: bytes, at: int) -> None:
        _, head = self._referred(code, at + 3)
        if code[head] not in b"hj":
            return
        action, place = self._referred(code, head)
        if not isinstance(action, str) or action == "oom" or self.width not in (0, place - at - 3):
            return
        width = place - at - 3
        pattern, made = [re.escape(code[at:place])], [b""]
        for _ in range(_PAIRS_MAX):
            begin = place
            if code[place] not in b"hj":
                return
            name, place = self._referred(code, place)
            if not isinstance(name, str) or name in ("action", "filename"):
                return
            pattern.append(re.escape(code[begin:place]))
            if name == "frames":
                pattern.append(_FRAMES)
                break
            place = self._value(code, place, pattern, made)
            if not place:
                return
        else:
            return
        self.width = width
        texts = tuple(self._text(piece) for piece in made[1:])
        match = re.compile(b"".join(pattern), re.DOTALL).match
        self.known[code[at + 3 : at + 3 + self.width]] = EventShape(match, (None, *texts))

    def _value(self, code: bytes, place: int, pattern: list[bytes], made: list[bytes]) -> int:
        """Add the pattern of one plain value; the place behind it, or 0 where it is none."""
        opcode, begin = code[place], place
        if opcode in b"hj":
            _, place = self._referred(code, place)
            pattern.append(re.escape(code[begin:place]))
        elif opcode in _NUMBER_SIZES or opcode == 0x8A:
            size = _NUMBER_SIZES.get(opcode) or 1 + code[place + 1]
            pattern.append(_NUMBER)
            place += 1 + size
        elif opcode == 0x8C:
            end = place + 2 + code[place + 1]
            if code[end] != 0x94:
                return 0
            made.append(code[place + 2 : end])
            place = end + 1
            pattern.append(re.escape(code[begin:place]))
        else:
            return 0
        return place


def places_of(run: bytes) -> list[int]:
    """The places in the memo that a run of references names."""
    places, at = [], 0
    while at < len(run):
        if run[at] == 0x68:
            places.append(run[at + 1])
            at += 2
        else:
            places.append(int.from_bytes(run[at + 1 : at + 5], "little"))
            at += 5
    return places


SIZE_MAX = 4 << 30
CHUNK = 1 << 20
MARGIN = 300  # no opcode of fixed size, with its short text, is longer


class ByteSource(Protocol):
    """Whatever bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


class ReadWindow:
    """The bytes around the place that is being read."""

    def __init__(self, source: ByteSource, name: str) -> None:
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


_BATCH = 1000  # pickle fills a container in batches of so many
_NAME_KEPT = 300  # characters of a file's or function's name
_DEPTH_MAX = 200  # a snapshot needs 8
_MEMORY_MAX = 2 << 30
_INT, _SHORT, _ID = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<I")
_LENGTH, _BYTE, _FRACTION = struct.Struct("<Q"), struct.Struct("<B"), struct.Struct(">d")
_RUN = re.compile(RUN, re.DOTALL)
_RUN_BYTES_KEPT = 64 << 20
_REPEATED = frozenset((str, dict, list, tuple, bytes))  # what pickle may refer to again
_CONSTANTS: dict[int, object] = {0x4E: None, 0x88: True, 0x89: False}
_TEXT_LENGTHS = {0x58: _ID, 0x8D: _LENGTH}  # BINUNICODE, BINUNICODE8
_BYTES_LENGTHS = {0x43: _BYTE, 0x42: _ID, 0x8E: _LENGTH}  # SHORT_BINBYTES, BINBYTES, BINBYTES8
_TUPLE_SIZES = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}
_REFUSED = {
    **dict.fromkeys(b"c\x93", "names a function or a class"),
    **dict.fromkeys(b"Rbio\x81\x92", "wants to build an object"),
    **dict.fromkeys(b"\x82\x83\x84", "uses the extension registry"),
    **dict.fromkeys(b"PQ\x97\x98", "refers to something outside the file"),
}


class FrameId(int):
    """A place in `PickleReader.frames`."""


class StackId(int):
    """A place in `PickleReader.stacks`."""


class PickleReader:
    """One reading of one file; `read` gives the tree, in which frames and stacks are ids and most events None."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self.frames: list[StackFrame] = []
        self.stacks: list[bytes] = [b""]
        self._window = ReadWindow(source, name)
        self._marked: list[tuple[list[object], int]] = []  # the stack below each mark, and the memo's last place then
        self._memo: list[object] = []
        self._texts: dict[bytes, str] = {}
        self._text_bytes = 0
        self._items = 0  # containers and what is in them, as far as it is kept
        self._frame_ids: dict[tuple[str, int, str], FrameId] = {}
        self._stack_ids: dict[bytes, StackId] = {}  # as bytes: small, and hashed in a way no file can foresee
        self._stack_items = 0
        self._runs: dict[bytes, StackId] = {}  # lists of references to frames, as they are written
        self._run_bytes = 0
        self._shapes = EventShapes(self._memo, self._text)

    def read(self) -> object:
        """The tree; BadInput in one line for all that is not plain data."""
        try:
            return self._run()
        except (IndexError, struct.error):
            raise BadInput(f"{self.name}: not a whole pickle: cut short or damaged") from None
        except MemoryError:
            raise TooLarge(f"{self.name}: not enough memory to read it") from None

    def _run(self) -> object:
        """The opcodes that make up nearly all of a snapshot are handled here, the others by `_seldom`."""
        window, memo, texts, marked = self._window, self._memo, self._texts, self._marked
        stack: list[object] = []
        code, at, last = b"", 0, -1
        while True:
            if at > last:
                self._count(len(stack))
                at = window.moved(at)
                code, last = window.bytes, window.last
            opcode = code[at]
            at += 1
            if opcode == 0x68:  # BINGET
                stack.append(memo[code[at]])
                at += 1
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[_ID.unpack_from(code, at)[0]])
                at += 4
            elif opcode == 0x4B:  # BININT1
                stack.append(code[at])
                at += 1
            elif opcode == 0x4D:  # BININT2
                stack.append(_SHORT.unpack_from(code, at)[0])
                at += 2
            elif opcode == 0x4A:  # BININT
                stack.append(_INT.unpack_from(code, at)[0])
                at += 4
            elif opcode == 0x8A:  # LONG1
                end = at + 1 + code[at]
                stack.append(self._long(code[at + 1 : end]))
                at = end
            elif opcode == 0x94:  # MEMOIZE
                if type(stack[-1]) not in _REPEATED:
                    raise self._odd("something repeated that pickle never repeats")
                memo.append(stack[-1])
            elif opcode == 0x28:  # MARK
                if len(marked) >= _DEPTH_MAX:
                    raise self._odd(f"nested deeper than {_DEPTH_MAX} levels")
                end = self._stack_at(at, stack)
                if end:
                    at = end
                else:
                    marked.append((stack, len(memo) - 1))
                    stack = []
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + code[at]
                piece = code[at + 1 : end]
                stack.append(texts.get(piece) or self._text(piece))
                at = end
            elif opcode == 0x7D:  # EMPTY_DICT
                begin = at - 1
                at = self._events(begin, stack) if code[at : at + 2] == b"\x94(" else begin
                if at == begin:
                    self._items += 1
                    stack.append({})
                    at += 1
            elif opcode == 0x5D:  # EMPTY_LIST
                self._items += 1
                stack.append([])
            elif opcode in b"ue":  # SETITEMS, APPENDS
                items, stack, place = self._to_mark(stack)
                (self._fill if opcode == 0x75 else self._extend)(stack, items, place)
            elif opcode == 0x2E:  # STOP
                return self._root(stack, at)
            else:
                at, stack = self._seldom(opcode, at, stack)
                code, last = window.bytes, window.last

    def _stack_at(self, at: int, stack: list[object]) -> int:
        """Make a list of frames, met in one go, the id of its stack. Gives the place behind it, or 0 where it is none."""
        if not stack or type(stack[-1]) is not list or not self._is_new(stack[-1], len(self._memo) - 1):
            return 0
        run = _RUN.match(self._window.bytes, at)
        if run is None or (known := self._runs.get(run[1]) or self._known(run[1])) is None:
            return 0
        stack[-1] = self._memo[-1] = known
        self._items -= 1
        return run.end()

    def _known(self, run: bytes) -> StackId | None:
        values = [self._memo[place] for place in places_of(run)]
        if set(map(type, values)) != {FrameId}:
            return None
        known = self.stack_id(values)
        if self._run_bytes < _RUN_BYTES_KEPT:
            self._runs[run] = known
            self._run_bytes += len(run) + 100
        return known

    def _events(self, at: int, stack: list[object]) -> int:
        """Take recorded events of known shape, one after the other, as nothing. Gives the place behind the last."""
        code, memo, shapes, runs = self._window.bytes, self._memo, self._shapes, self._runs
        while True:
            begin = at + 3
            shape = shapes.known.get(code[begin : begin + shapes.width])
            event = shape.match(code, at) if shape is not None else None
            if shape is None or event is None:
                shapes.learn(code, at)
                return at
            run, reference = event.groups()
            if run is not None:
                if (known := runs.get(run)) is None:
                    return at
                memo += shape.made
                memo.append(known)
            elif reference is None:
                memo += shape.made
                memo.append([])
                self._items += 1
            elif int.from_bytes(reference[1:], "little") < len(memo):
                memo += shape.made
            else:
                return at
            stack.append(None)
            at = event.end()

    def _count(self, waiting: int) -> None:
        """Between two chunks: what is held, in bytes, roughly and rather too much."""
        held = self._items * 80 + len(self._memo) * 8 + len(self._texts) * 160 + self._text_bytes * 2 + waiting * 40
        held += self._stack_items * 4 + len(self._stack_ids) * 200 + len(self._frame_ids) * 300
        if held > _MEMORY_MAX:
            raise TooLarge(f"{self.name}: would take more than {_MEMORY_MAX >> 30} GiB of memory to read")

    def _odd(self, what: str) -> BadInput:
        return BadInput(f"{self.name}: not a memory snapshot: {what}")

    def _long(self, digits: bytes) -> int:
        if len(digits) > 16:
            raise self._odd(f"a number of {len(digits)} bytes")
        return int.from_bytes(digits, "little", signed=True)

    def _text(self, piece: bytes) -> str:
        """Text of a file, kept once however often it is written there."""
        word = self._texts.get(piece)
        if word is None:
            word = self._texts[piece] = piece.decode("utf-8", "replace")
            self._text_bytes += len(piece)
        return word

    def _to_mark(self, stack: list[object]) -> tuple[list[object], list[object], int]:
        """All since the last mark, the stack below it, and the memo's last place when it was set."""
        if not self._marked:
            raise self._odd("a damaged pickle")
        below, place = self._marked.pop()
        return stack, below, place

    def _is_new(self, container: object, place: int) -> bool:
        """True if it is empty and was put at that place of the memo, which makes it ours to replace."""
        return not container and 0 <= place < len(self._memo) and self._memo[place] is container

    def _fill(self, stack: list[object], items: list[object], place: int) -> None:
        """Put pairs into the dict on top; a frame becomes an id, an event that is no failure becomes None."""
        top, names = stack[-1], items[::2]
        if not isinstance(top, dict) or len(items) % 2 or set(map(type, names)) - {str}:
            raise self._odd("a table whose names are not text")
        if self._is_new(top, place):
            fields = dict(zip(names, items[1::2], strict=True))
            is_frame = "filename" in fields
            if is_frame or fields.get("action", "oom") != "oom":
                stack[-1] = self._memo[place] = self._frame_id(fields) if is_frame else None
                self._items -= 1
                return
        top.update(zip(names, items[1::2], strict=True))
        self._items += len(names)

    def _frame_id(self, fields: dict[object, object]) -> FrameId:
        filename, line, name = fields.get("filename"), fields.get("line"), fields.get("name")
        if not isinstance(filename, str) or not isinstance(name, str) or not isinstance(line, int):
            raise self._odd("a frame of a stack without a file, a line or a name")
        key = (filename, line, name)
        found = self._frame_ids.get(key)
        if found is None:
            found = self._frame_ids[key] = FrameId(len(self.frames))
            self.frames.append(StackFrame(filename[-_NAME_KEPT:], line, name[:_NAME_KEPT]))
        return found

    def _extend(self, stack: list[object], items: list[object], place: int) -> None:
        """Put items into the list on top; a list of frames becomes the id of a stack, equal ones the same id."""
        top = stack[-1]
        if not isinstance(top, list):
            raise self._odd("items for something that is no list")
        if len(items) < _BATCH and self._is_new(top, place) and set(map(type, items)) == {FrameId}:
            stack[-1] = self._memo[place] = self.stack_id(items)
            self._items -= 1
        else:
            top.extend(items)
            self._items += len(items)

    def stack_id(self, frames: Sequence[object]) -> StackId:
        """The id of a stack of frame ids."""
        packed = array("I", cast("Sequence[FrameId]", frames)).tobytes()
        found = self._stack_ids.get(packed)
        if found is None:
            found = self._stack_ids[packed] = StackId(len(self.stacks))
            self.stacks.append(packed)
            self._stack_items += len(frames)
        return found

    def frames_of(self, stack: StackId) -> tuple[int, ...]:
        """The places in `frames` that make up a stack, innermost first."""
        return tuple(memoryview(self.stacks[stack]).cast("I"))

    def _root(self, stack: list[object], at: int) -> object:
        if len(stack) != 1 or self._marked or at > len(self._window.bytes):
            raise self._odd("a damaged pickle")
        return stack[0]

    def _seldom(self, opcode: int, at: int, stack: list[object]) -> tuple[int, list[object]]:
        """Any other opcode; gives the place of the next one, and the stack."""
        if (why := _REFUSED.get(opcode)) is not None:
            raise BadInput(f"{self.name}: refused: this pickle {why}; a memory snapshot is plain data. Nothing was run")
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif (lengths := _TEXT_LENGTHS.get(opcode) or _BYTES_LENGTHS.get(opcode)) is not None:
            (size,) = lengths.unpack_from(self._window.bytes, at)
            piece, at = self._window.taken(at + lengths.size, size)
            stack.append(self._text(piece) if opcode in _TEXT_LENGTHS else piece)
            self._text_bytes += size if opcode in _BYTES_LENGTHS else 0
        elif (size := _TUPLE_SIZES.get(opcode, -1)) >= 0:
            if len(stack) < size:
                raise IndexError
            values = tuple(stack[len(stack) - size :])
            stack[len(stack) - size :] = [values]
            self._items += 1 + size
        elif opcode in b"t\x91\x90":  # TUPLE, FROZENSET, ADDITEMS; nothing is hashed, so a set is kept as a list
            items, stack, place = self._to_mark(stack)
            if opcode == 0x90:
                self._extend(stack, items, place)
            else:
                stack.append(tuple(items))
                self._items += 1 + len(items)
        else:
            at = self._other(opcode, at, stack)
        return at, stack

    def _other(self, opcode: int, at: int, stack: list[object]) -> int:
        code = self._window.bytes
        if opcode == 0x61:  # APPEND
            item = stack.pop()
            self._extend(stack, [item], -1)
        elif opcode == 0x73:  # SETITEM
            value, name = stack.pop(), stack.pop()
            self._fill(stack, [name, value], -1)
        elif opcode == 0x8F:  # EMPTY_SET
            self._items += 1
            stack.append([])
        elif opcode == 0x47:  # BINFLOAT
            stack.append(_FRACTION.unpack_from(code, at)[0])
            at += 8
        elif opcode in b"qr":  # BINPUT, LONG_BINPUT: pickle numbers one after the other, which MEMOIZE says in one byte
            place, at = (code[at], at + 1) if opcode == 0x71 else (_ID.unpack_from(code, at)[0], at + 4)
            if place != len(self._memo) or type(stack[-1]) not in _REPEATED:
                raise self._odd("a memo out of order")
            self._memo.append(stack[-1])
        elif opcode == 0x80:  # PROTO
            if code[at] > 5:
                raise self._odd(f"pickle protocol {code[at]}")
            at += 1
        elif opcode == 0x95:  # FRAME: how many bytes belong together, which a reader may ignore
            if _LENGTH.unpack_from(code, at)[0] > SIZE_MAX:
                raise self._odd("a frame larger than any file")
            at += 8
        else:
            raise self._odd(f"its byte {self._window.offset(at) - 1} is not one that pickle writes for plain data")
        return at
