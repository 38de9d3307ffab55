"""The cards of this machine, through a library that says what we want it to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.hardware.cards import NvmlCard, read_cards


class _Library:
    """Stands in for pynvml, which answers only where an NVIDIA driver runs."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, cards: list[tuple[Any, int, int]], *, broken: bool = False) -> None:
        self.cards = cards
        self.broken = broken
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802 (pynvml's own names)
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:  # noqa: N802
        return self.cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.cards[handle][1], used=self.cards[handle][2])


def test_cards_are_listed_with_what_others_hold() -> None:
    """Names as text whatever the library's age, memory in bytes, and the library is closed again."""
    library = _Library([("NVIDIA H200", 150, 3), (b"NVIDIA L4", 24, 0)])
    assert read_cards(library) == [NvmlCard("NVIDIA H200", 150, 3), NvmlCard("NVIDIA L4", 24, 0)]
    assert not library.is_open


def test_a_driver_that_does_not_answer_is_the_worlds_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to do instead; without the library that is the user's to mend."""
    with pytest.raises(WorldFailed, match="name the card with --gpu"):
        read_cards(_Library([], broken=True))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(BadInput, match="which card"):
        read_cards()
