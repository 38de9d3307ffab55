"""Planned against measured, term by term."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.domain.units import format_count, format_gib
from plimsoll.plan.learned import TermDifference

_NAMES = {
    "non_torch": "non-torch",
    "non_torch+activation": "non-torch and activation",
    "graphs_actual": "graphs, as captured",
    "kv": "KV cache",
    "kv_tokens": "KV cache, tokens",
}


def as_text(differences: Sequence[TermDifference]) -> str:
    """One line a term; what lay outside its band is marked."""
    lines = ["Learned from this start; the next plan of this shape, card and release uses it.", ""]
    lines.append(f"  {'term':26}{'planned':>14}{'measured':>14}{'error':>12}")
    for difference in differences:
        shown = format_count if difference.term == "kv_tokens" else format_gib
        mark = "" if difference.is_in_band else "   outside the band"
        name, planned = _NAMES.get(difference.term, difference.term), shown(difference.predicted.value)
        lines.append(f"  {name:26}{planned:>14}{shown(difference.measured):>14}{shown(difference.error):>12}{mark}")
    return "\n".join(lines)


def as_json(differences: Sequence[TermDifference]) -> str:
    """One object of the schema plimsoll.plan/1 with the key `learned`."""
    import json

    rows = [
        {
            "term": d.term,
            "predicted": {"value": d.predicted.value, "low": d.predicted.low, "high": d.predicted.high},
            "measured": d.measured,
            "error": d.error,
            "in_band": d.is_in_band,
        }
        for d in differences
    ]
    return json.dumps({"schema": "plimsoll.plan/1", "learned": rows}, indent=2)


def forgotten(count: int, *, is_json: bool) -> str:
    """What --forget did."""
    if is_json:
        return f'{{"schema": "plimsoll.plan/1", "forgotten": {count}}}'
    return f"forgot {count} {'correction' if count == 1 else 'corrections'}"
