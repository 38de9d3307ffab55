"""Whether the card is sick: then nothing is restarted onto it."""

from __future__ import annotations

from plimsoll.doctor.xids import Blame, explain
from plimsoll.domain.finding import Evidence
from plimsoll.guard.history import History
from plimsoll.guard.policy import Policy
from plimsoll.guard.tracker import Seen, no, unknown, yes


def sick(history: History, policy: Policy, now_s: float) -> Seen:
    """An Xid that means hardware, or an ECC error that was not mended, since guard looks."""
    del policy, now_s
    last = history.last
    if last is None or not last.cards:
        return unknown("NotReadable", "the driver's word is not at hand: guard runs on another host, or without NVML")
    errors = []
    for one in last.cards:
        errors += [f"Xid {xid} on card {one.name}" for xid in one.xids if explain(xid).blame is Blame.FAULT]
        errors += [f"{one.uncorrectable} uncorrectable ECC errors on card {one.name}"] if one.uncorrectable else []
    if errors:
        return yes("HardwareErrors", errors[0], *(Evidence("driver", text) for text in errors[:5]))
    return no("Well", "the driver reports no error")
