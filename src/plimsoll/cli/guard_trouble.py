"""What goes wrong with guard itself: one sentence when it begins, one when it is over, and shown for as long as it lasts."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.report.guard import Trouble

MOST_TEXTS = 20  # that are told of one trouble: what says something else each time is still one trouble


class _Held:
    """One trouble that lasts."""

    def __init__(self, text: str, since_s: float) -> None:
        self.text, self.since_s = text, since_s
        self.told: set[str] = set()


class Troubles:
    """By what they are about: the webhook, standard output, a finder, ..."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._held: dict[str, _Held] = {}

    def note(self, what: str, text: str, *, patience_s: float = 0.0) -> None:
        """How it is with this one: empty when it is well. Told once it has lasted for so long."""
        held, now_s = self._held.get(what), self._clock()
        if not text:
            if held is not None:
                del self._held[what]
                if held.told:
                    self._tell(f"{what}: well again")
            return
        if held is None:
            held = self._held[what] = _Held(text, now_s)
        held.text = text
        if text not in held.told and len(held.told) < MOST_TEXTS and now_s - held.since_s >= patience_s:
            held.told.add(text)
            self._tell(f"{what}: {text}")

    def now(self) -> tuple[Trouble, ...]:
        """Those that were told and last."""
        return tuple(Trouble(what, held.text, held.since_s) for what, held in sorted(self._held.items()) if held.told)
