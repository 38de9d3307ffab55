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
from collections.abc import Sequence
from typing import cast

from plimsoll.domain.memory_snapshot import Frame
from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.snapshot_events import RUN, Shapes, places_of
from plimsoll.sources.snapshot_window import SIZE_MAX, Source, Window

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

    def __init__(self, source: Source, name: str) -> None:
        self.name = name
        self.frames: list[Frame] = []
        self.stacks: list[bytes] = [b""]
        self._window = Window(source, name)
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
        self._shapes = Shapes(self._memo, self._text)

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
        """Whether it is empty and was put at that place of the memo, which makes it ours to replace."""
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
            self.frames.append(Frame(filename[-_NAME_KEPT:], line, name[:_NAME_KEPT]))
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
