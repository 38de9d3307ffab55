"""The table in docs/standin.md: how much was compared, and what differs and why."""

from __future__ import annotations

from typing import Any

from lab.conformance.compare import ALLOWED, EITHER, NEAR, Allowed, Difference, beyond, comparable

BEGIN = "<!-- made by `python -m lab.conformance --write`; do not edit -->"
END = "<!-- end -->"
# What each part of a recording is, in words, and where in it the things counted are.
ROWS = (
    ("answers to questions", "main/requests"),
    ("answers with an API key, without development mode", "keyed/requests"),
    ("counters, requests one after another", "main/counters"),
    ("metric families", "main/metrics/families"),
    ("a pause that keeps", "main/kept"),
    ("aborts", "main/aborted"),
    ("the gate and its drain", "main/gate"),
    ("SIGTERM", "main/sigterm"),
    ("SIGTERM with `--shutdown-timeout`", "keyed/sigterm"),
    ("preemptions, requests that were held until all were there", "small/held"),
    ("preemptions, requests at once", "small/at once"),
    ("a step without memory", "oom"),
    ("starts that cannot succeed", "starts"),
)


def block(real: dict[str, Any], found: list[Difference], allowed: tuple[Allowed, ...] = ALLOWED) -> str:
    """The block between its two marks."""
    own = comparable(real)
    lines = [BEGIN, "", "| compared | things | values in them | values that differ |", "|---|---|---|---|"]
    for words, place in ROWS:
        part = own
        for key in place.split("/"):
            part = part[key]
        here = [one for one in found if one.where.startswith(f"{place}/")]
        lines.append(f"| {words} | {len(part)} | {_leaves(part)} | {len(here)} |")
    lines += ["", "Differences that are accepted:" if allowed else "No difference is accepted.", ""]
    for reason in dict.fromkeys(rule.reason for rule in allowed):
        places = ", ".join(f"`{rule.where}`" for rule in allowed if rule.reason == reason)
        lines.append(f"- {reason}: {places}")
    lines += ["", "Numbers that need only be near:", ""]
    lines += [f"- `{rule.where}` ({_bound(rule.share, rule.plus)}): {rule.reason}" for rule in NEAR]
    lines += ["", "Values that a race decides:", ""]
    lines += [f"- `{rule.where}` ({', '.join(map(str, rule.values))}): {rule.reason}" for rule in EITHER]
    if left := beyond(found, allowed):
        lines += ["", "Differences that are not explained yet:", ""]
        lines += [f"- {one}" for one in left]
    return "\n".join([*lines, END])


def _bound(share: float, plus: float) -> str:
    words = [f"{share:.0%}" if share else "", f"{plus:g}" if plus else ""]
    return " + ".join(filter(None, words))


def _leaves(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(_leaves(one) for one in (value.values() if isinstance(value, dict) else value))
    return 1


def page(text: str, made: str) -> str:
    """A page with the block made anew; the rest is as it was."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no place for the table: {BEGIN}")
    return head + made + tail
