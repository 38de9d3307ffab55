"""Reading the keys of a config.json: by every name a family gives them, typed, bounded, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from plimsoll.errors import BadInput

# Far beyond any model, and small enough that nothing we build from them can grow large.
LAYERS_MAX = 4096
HEADS_MAX = 1 << 16
WIDTH_MAX = 1 << 24
VOCAB_MAX = 1 << 28
CONTEXT_MAX = 1 << 40
EXPERTS_MAX = 1 << 20
LIST_MAX = 1 << 17
TEXT_MAX = 512

_NOTHING: Mapping[str, object] = MappingProxyType({})


class Keys:
    """One object of a config.json. Null counts as absent, and a value of the wrong type is BadInput.

    `defaults` are the values transformers fills in where a key is absent altogether; `defaulted` records the ones
    that were asked for, because whoever reads the result should know that the file did not say so.
    """

    __slots__ = ("_defaults", "_path", "_values", "defaulted")

    def __init__(self, values: Mapping[str, object], path: str = "", defaults: Mapping[str, object] = _NOTHING) -> None:
        self._values = values
        self._path = path
        self._defaults = defaults
        self.defaulted: dict[str, object] = {}

    def with_defaults(self, defaults: Mapping[str, object]) -> Keys:
        """The same object, read with a family's defaults."""
        return Keys(self._values, self._path, defaults)

    def has(self, *names: str) -> bool:
        """Whether the file gives one of these keys a value."""
        return any(self._values.get(name) is not None for name in names)

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        for name in names:
            if (value := self._values.get(name)) is not None:
                return name, value
        if not any(name in self._values for name in names):
            for name in names:
                if (value := self._defaults.get(name)) is not None:
                    self.defaulted[name] = value
                    return name, value
        return names[0], None

    def _wrong(self, name: str, wanted: str, value: object) -> BadInput:
        return BadInput(f"config.json: {self._path}{name} should be {wanted}, not {_shown(value)}")

    def missing(self, name: str) -> BadInput:
        """The error for a key we cannot do without."""
        return BadInput(f"config.json: {self._path}{name} is missing")

    def count(self, *names: str, least: int = 1, most: int = WIDTH_MAX) -> int | None:
        """The first of these keys that has a value, as a whole number within bounds."""
        name, value = self._find(names)
        if value is None:
            return None
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return number

    def need(self, *names: str, most: int = WIDTH_MAX) -> int:
        """Like `count`, for a key without which there is no shape."""
        number = self.count(*names, most=most)
        if number is None:
            raise self.missing(names[0])
        return number

    def count_or_largest(self, *names: str, least: int = 0, most: int = WIDTH_MAX) -> int | None:
        """Like `count`, but a list (one value per layer or per modality) stands for its largest value."""
        name, value = self._find(names)
        if isinstance(value, (list, tuple)):
            return max(self.counts(name, least=least, most=most) or (), default=None)
        return self.count(*names, least=least, most=most)

    def counts(self, name: str, *, least: int = 0, most: int = WIDTH_MAX, null: int | None = None) -> tuple[int, ...] | None:
        """A list of whole numbers, in which null may stand for one of them."""
        items = self.items(name)
        if items is None:
            return None
        wholes = (null if item is None else _whole(item) for item in items)
        numbers = tuple(number for number in wholes if number is not None and least <= number <= most)
        if len(numbers) != len(items):
            raise self._wrong(name, f"a list of whole numbers from {least} to {most}", items)
        return numbers

    def items(self, name: str) -> Sequence[object] | None:
        """A list of anything."""
        _, value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > LIST_MAX:
            raise self._wrong(name, f"a list of at most {LIST_MAX} values", value)
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of short strings."""
        items = self.items(name)
        if items is None:
            return None
        words = tuple(item for item in items if isinstance(item, str) and len(item) <= TEXT_MAX)
        if len(words) != len(items):
            raise self._wrong(name, "a list of strings", items)
        return words

    def word(self, *names: str) -> str | None:
        """A short string."""
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > TEXT_MAX:
            raise self._wrong(name, "a short string", value)
        return value

    def flag(self, name: str) -> bool | None:
        """True or false."""
        _, value = self._find((name,))
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def factor(self, name: str, *, most: float = 1e6) -> float | None:
        """A positive number that need not be whole."""
        _, value = self._find((name,))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise self._wrong(name, f"a number above 0 and up to {most:g}", value)
        return float(value)

    def child(self, name: str) -> Keys | None:
        """A nested object, or None where it is absent or empty."""
        _, value = self._find((name,))
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return Keys(value, f"{self._path}{name}.") if value else None

    def part(self, *names: str) -> Keys | None:
        """The first of these keys that holds an object, where a family may write something else; None if none does."""
        name = next((name for name in names if isinstance(self._find((name,))[1], Mapping)), None)
        return self.child(name) if name else None

    def children(self, name: str) -> tuple[Keys, ...] | None:
        """A list of objects."""
        items = self.items(name)
        if items is None:
            return None
        found = tuple(Keys(item, f"{self._path}{name}[{n}].") for n, item in enumerate(items) if isinstance(item, Mapping))
        if len(found) != len(items):
            raise self._wrong(name, "a list of objects", items)
        return found

    def values(self) -> Iterable[Keys]:
        """The nested objects of this one, whatever they are called; anything else in it is passed over."""
        return (
            Keys(value, f"{self._path}{name}.") for name, value in self._values.items() if isinstance(value, Mapping) and value
        )

    def is_word(self, name: str) -> bool:
        """Whether the key holds a string, where a family allows either."""
        return isinstance(self._find((name,))[1], str)

    def is_list(self, name: str) -> bool:
        """Whether the key holds a list, where a family allows either."""
        return isinstance(self._find((name,))[1], (list, tuple))

    def size(self, *names: str) -> int | None:
        """A size that only describes something: what is not a sensible whole number is unknown, not an error."""
        _, value = self._find(names)
        number = _whole(value)
        return number if number is not None and 0 < number <= WIDTH_MAX else None


def _whole(value: object) -> int | None:
    """4096 or 4096.0; never true, which is an int to Python."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _shown(value: object) -> str:
    """A value in one short line, without walking into what may be deep or long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "such a list" if value else "an empty list"
    return f"a {type(value).__name__}"
