"""The memory of each card as parts that add up to it, and the line up to which the engine may load it.

    |<----------------------------------- the card ----------------------------------->|
    | weights | graphs | activation | KV used | KV free | releasable | unreleasable | outside torch | others | slack |
    |<-------------------- the load line: what vLLM was given ------------------->|

What the probe measures is torch's live memory, what it could give back and what it could not, and what is free. Weights and KV
cache are what the worker reckoned with at its start; live memory beyond them and the graphs is activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.domain.look import Card, Look, Worker

NO_FIGURES = (
    "unknown: no worker tells of its memory. Start vLLM with --worker-extension-cls plimsoll.inside.Probe "
    "--middleware plimsoll.inside.Gate, and give guard the gate's token (docs/inside.md)"
)
NO_PARTS = "which of it is weights and KV cache is unknown: that comes with the gate's token (docs/inside.md)"
CARD_ONLY = "only the driver tells: what is inside the engine's share comes from the probe (docs/inside.md)"
NO_LINE = "the load line is unknown: the worker does not say what it was given"
MOST_CARDS = 16


def ledgers(look: Look | None) -> dict[str, Any]:
    """One bar for each worker, the tightest first; else one for each card that the driver tells of; else why there is none."""
    if look is None:
        return {"bars": [], "why": "unknown: not looked at yet", "left_out": 0}
    usage = look.figures.get("kv_cache_usage")
    bars = [bar for worker in look.workers if (bar := worker_bar(worker, usage)) is not None]
    bars = bars or [bar for card in look.cards if (bar := card_bar(card)) is not None]
    bars.sort(key=lambda bar: (bar["parts"][-1]["bytes"], bar["name"]))
    return {"bars": bars[:MOST_CARDS], "why": "" if bars else NO_FIGURES, "left_out": max(0, len(bars) - MOST_CARDS)}


def worker_bar(worker: Worker, usage: float | None) -> dict[str, Any] | None:
    """The card of one worker; None where its size or what is free is not known."""
    total, free, live = worker.device_total, worker.device_free, worker.allocated
    if total is None or free is None or not 0 <= free <= total or total <= 0:
        return None
    parts: list[tuple[str, float]] = []
    notes = []
    left = min(live or 0.0, total - free)
    if live is not None:
        inside, told_apart = _inside(worker, left, usage)
        parts += inside
        notes += [] if told_apart else [NO_PARTS]
    else:
        notes.append("what torch holds is unknown")
    rest = total - free - left
    for name, value in (("releasable", worker.releasable), ("unreleasable", worker.unreleasable)):
        size = min(value or 0.0, rest)
        parts += [] if value is None else [(name, size)]
        rest -= size
    others = min(worker.by_others or 0.0, rest)
    parts.append(("outside", rest - others))
    parts += [] if worker.by_others is None else [("others", others)]
    notes += [NO_LINE] if worker.requested is None else []
    return _bar(f"worker {worker.rank}", total, [*parts, ("slack", free)], worker.requested, notes, worker.activation_peak)


def _inside(worker: Worker, live: float, usage: float | None) -> tuple[list[tuple[str, float]], bool]:
    """Live memory by what it is for, and whether that is known."""
    if worker.weights is None or worker.kv_cache is None:
        return [("live", live)], False
    weights = min(worker.weights, live)
    kv = min(worker.kv_cache, live - weights)
    graphs = min(worker.graphs or 0.0, live - weights - kv)
    cache = [("kv", kv)] if usage is None or not 0 <= usage <= 1 else [("kv_used", kv * usage), ("kv_free", kv - kv * usage)]
    known = [] if worker.graphs is None else [("graphs", graphs)]
    return [("weights", weights), *known, ("activation", live - weights - kv - graphs), *cache], True


def card_bar(card: Card) -> dict[str, Any] | None:
    """What the driver says of one card."""
    if card.total is None or card.free is None or not 0 <= card.free <= card.total or card.total <= 0:
        return None
    used = card.total - card.free
    own = None if card.by_engine is None else min(card.by_engine, used)
    parts = [("used", used)] if own is None else [("engine", own), ("others", used - own)]
    return _bar(card.name, card.total, [*parts, ("slack", card.free)], None, [CARD_ONLY])


def _bar(
    name: str,
    total: float,
    parts: Sequence[tuple[str, float]],
    line: float | None,
    notes: Sequence[str],
    activation_peak: float | None = None,
) -> dict[str, Any]:
    """Whole bytes that add up to the card: what rounding leaves goes to the last."""
    whole = [(part, int(size)) for part, size in parts[:-1]]
    whole.append((parts[-1][0], int(total) - sum(size for _, size in whole)))
    return {
        "name": name, "total": int(total), "parts": [{"part": part, "bytes": size} for part, size in whole],
        "line": None if line is None or not 1 <= line <= total else int(line),
        "activation_peak": None if activation_peak is None else int(activation_peak), "notes": list(notes),
    }  # fmt: skip
