"""The demo's result: requests served and lost, guard's actions, and each engine's time in each state. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll.demo.traffic import Count
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OUTCOME, Entry

SCHEMA = "plimsoll.demo/1"
SERVING, SHEDDING, OUT = "serving", "shedding", "out of service"
STATES = (SERVING, SHEDDING, OUT)
# The step that begins a state, at its intent or at its outcome, and the one whose outcome ends it.
_BEGINS = {(OUTCOME, "shed"): SHEDDING, (INTENT, "leave"): OUT, (INTENT, "drain"): OUT}
_ENDS = {"unshed": SHEDDING, "undrain": OUT}


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident: its title, how long it took, and what went wrong, if anything."""

    title: str
    seconds: float
    wrong: str = ""


def times(entries: Sequence[Entry], engines: Sequence[str], began: float, ended: float) -> dict[str, dict[str, float]]:
    """Returns the seconds that each engine spent in each state, by guard's journal; they add up to the whole time."""
    found: dict[str, dict[str, float]] = {}
    for engine in engines:
        mine = [one for one in entries if one.engine == engine]
        spent = dict.fromkeys(STATES, 0.0)
        since: dict[str, float] = {}
        for one in mine:
            begins = _BEGINS.get((one.kind, one.step))
            if begins is not None and (one.kind == INTENT or one.fields.get("done")):
                since.setdefault(begins, one.at)
            ends = _ENDS.get(one.step) if one.kind == OUTCOME and one.fields.get("done") else None
            if ends in since:
                spent[ends] += one.at - since.pop(ends)
        for state, at in since.items():
            spent[state] += max(0.0, ended - at)
        spent[SERVING] = max(0.0, ended - began - spent[SHEDDING] - spent[OUT])
        found[engine] = spent
    return found


def actions(entries: Sequence[Entry]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for one in entries:
        if one.kind == CLOSED:
            ends = found.setdefault(str(one.fields.get("grade", "unknown")), Counter())
            ends[str(one.fields.get("end", "unknown"))] += 1
    return found


class DemoSummary(NamedTuple):
    seconds: float
    requests: Count
    sent_again: int  # requests that the balancer gave to another engine
    played: Sequence[Incident]
    actions: Mapping[str, Mapping[str, int]]
    times: Mapping[str, Mapping[str, float]]
    page: str

    @property
    def is_fine(self) -> bool:
        """True if no request was lost and every incident ended as it should."""
        return not self.requests.lost and not any(one.wrong for one in self.played)

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints."""
        count = self.requests
        return {
            "schema": SCHEMA,
            "fine": self.is_fine,
            "seconds": round(self.seconds, 1),
            "requests": {
                "asked": count.asked, "served": count.served, "lost": len(count.lost), "waited": count.waited,
                "told_to_wait": count.told_to_wait, "sent_again": self.sent_again, "output_tokens": count.tokens,
            },
            "lost": [{"at_s": round(one.at_s, 1), "what": one.what} for one in count.lost[:100]],
            "parts": [{"title": one.title, "seconds": round(one.seconds, 1), "wrong": one.wrong} for one in self.played],
            "actions": self.actions,
            "states": {engine: {state: round(s, 1) for state, s in spent.items()} for engine, spent in self.times.items()},
            "page": self.page,
        }  # fmt: skip

    def lines(self) -> list[str]:
        count = self.requests
        found = [
            f"requests   {count.served:,} served, {len(count.lost):,} lost",
            f"           {count.waited:,} were told to wait and were served later",
            f"           sent to another engine by the balancer, because the first gave no answer: {self.sent_again:,}",
        ]
        found += [f"           lost after {one.at_s:.1f} s: {one.what}" for one in count.lost[:5]]
        did = [f"{number} x {grade} ({end})" for grade, ends in self.actions.items() for end, number in ends.items()]
        found.append(f"guard did  {', '.join(did) or 'nothing'}")
        for engine, spent in self.times.items():
            found.append(f"engine {engine}   {', '.join(f'{s:.0f} s {state}' for state, s in spent.items() if s >= 0.5)}")
        found += [f"not right  {one.title}: {one.wrong}" for one in self.played if one.wrong]
        return found
