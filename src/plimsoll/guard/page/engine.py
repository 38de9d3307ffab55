"""The page's data: one line for each engine, and one engine in sections that change independently."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from plimsoll.doctor.rules.contained import last_words
from plimsoll.findings import Severity
from plimsoll.guard.act.steps import ActionRun
from plimsoll.guard.judge.look import CardState, Look, Reach, WorkerMemory
from plimsoll.redaction import hide_user_text, plain, redact
from plimsoll.render.doctor import finding_json
from plimsoll.render.guard import Clock, EngineView, Event, canary_json, condition_json, event_json, forecast_json, grade_of
from plimsoll.render.journal import entry_sentence
from plimsoll.unknown import Reading, Unknown

_TABLES = yaml.safe_load(files("plimsoll.guard.page").joinpath("figures.yaml").read_text(encoding="utf-8"))
LONGEST = 300
MORE = "…"


@lru_cache(8192)  # the same few words for hundreds of engines, and looking for secrets is the slow part
def _shown(text: str) -> str:
    safe = "".join(
        letter if letter.isprintable() else " " if letter in "\n\r\t" else f"[U+{ord(letter):04X}]"
        for letter in hide_user_text(redact(text)).strip()
    )
    return safe if len(safe) <= LONGEST else safe[: LONGEST - 1] + MORE


def shown(text: str) -> str:
    """Returns a text without secrets and control characters, of bounded length."""
    cut = text[: 4 * LONGEST]
    found = _shown(cut)
    return found if len(cut) == len(text) or found.endswith(MORE) else found[: LONGEST - 1] + MORE


def tidy(value: object) -> object:
    """Returns plain data with every text cleaned."""
    return plain(value, shown)


NOT_SEEN = Unknown("not looked at yet")


class EngineControl(NamedTuple):
    """Guard's permission to act on an engine, and its action in progress."""

    is_acting: bool = False
    is_paused: bool = False  # guard as a whole, or this engine
    rungs_off: tuple[str, ...] = ()
    doing: ActionRun | None = None
    approval: str = ""  # the id of an action that waits for approval


class EngineState(NamedTuple):
    """One engine with its readings, its last half hour and its events."""

    view: EngineView
    readings: Mapping[str, Reading] = {}  # by the names of `_figures`
    guarding: EngineControl = EngineControl()
    series: Mapping[str, Sequence[float | None]] = {}  # "t" in seconds since 1970, and each figure; None if unknown
    changes: Sequence[Event] = ()

    def reading(self, name: str) -> Reading:
        return self.readings.get(name, NOT_SEEN)


def id_of(name: str) -> str:
    """Returns the id of an engine in addresses and requests, whatever its name contains."""
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]


# The memory of each card as parts that add up to it, and the line up to which the engine may load it.
#
# |<----------------------------------- the card ----------------------------------->|
# | weights | graphs | activation | KV used | KV free | releasable | unreleasable | outside torch | others | slack |
# |<-------------------- the load line: what vLLM was given ------------------->|
#
# The probe measures torch's live memory, its releasable and unreleasable reserve, and the free memory. Weights and KV cache are
# the worker's own figures from its start; live memory beyond them and the graphs is activation.

NO_FIGURES = (
    "unknown: no worker reports its memory. Start vLLM with --worker-extension-cls plimsoll.inside.Probe "
    "--middleware plimsoll.inside.Gate, and give guard the gate's token (docs/inside.md)"
)
NO_PARTS = "weights and KV cache are not told apart: that needs the gate's token (docs/inside.md)"
CARD_ONLY = "driver figures only: what is inside the engine's share comes from the probe (docs/inside.md)"
NO_LINE = "the load line is unknown: the worker does not report its budget"
MOST_CARDS = 16


def ledgers(look: Look | None) -> dict[str, Any]:
    """Returns one bar for each worker, the tightest first; else one for each GPU of the driver; else why there is none."""
    if look is None:
        return {"bars": [], "why": "unknown: not looked at yet", "left_out": 0}
    usage = look.figures.get("kv_cache_usage")
    bars = [bar for worker in look.workers if (bar := worker_bar(worker, usage)) is not None]
    bars = bars or [bar for card in look.cards if (bar := card_bar(card)) is not None]
    bars.sort(key=lambda bar: (bar["parts"][-1]["bytes"], bar["name"]))
    return {"bars": bars[:MOST_CARDS], "why": "" if bars else NO_FIGURES, "left_out": max(0, len(bars) - MOST_CARDS)}


def worker_bar(worker: WorkerMemory, usage: float | None) -> dict[str, Any] | None:
    """Returns the memory bar of one worker; None if its size or free memory is unknown."""
    total, free, live = worker.device_total, worker.device_free, worker.allocated
    if total is None or free is None or not 0 <= free <= total or total <= 0:
        return None
    parts: list[tuple[str, float]] = []
    notes = []
    left = min(live or 0.0, total - free)
    if live is not None:
        parts += _inside(worker, left, usage)
        notes += [NO_PARTS] if parts[0][0] == "live" else []
    else:
        notes.append("torch's memory is unknown")
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


def _inside(worker: WorkerMemory, live: float, usage: float | None) -> list[tuple[str, float]]:
    """Returns live memory by purpose; as one part where the purposes are unknown."""
    if worker.weights is None or worker.kv_cache is None:
        return [("live", live)]
    weights = min(worker.weights, live)
    kv = min(worker.kv_cache, live - weights)
    graphs = min(worker.graphs or 0.0, live - weights - kv)
    cache = [("kv", kv)] if usage is None or not 0 <= usage <= 1 else [("kv_used", kv * usage), ("kv_free", kv - kv * usage)]
    known = [] if worker.graphs is None else [("graphs", graphs)]
    return [("weights", weights), *known, ("activation", live - weights - kv - graphs), *cache]


def card_bar(card: CardState) -> dict[str, Any] | None:
    """Returns the memory bar of one GPU by the driver's figures; None where they are unknown."""
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
    peak: float | None = None,
) -> dict[str, Any]:
    """Returns a bar of whole bytes that add up to the device: the last part takes the rounding."""
    whole = [(part, int(size)) for part, size in parts[:-1]]
    whole.append((parts[-1][0], int(total) - sum(size for _, size in whole)))
    return {
        "name": name, "total": int(total), "parts": [{"part": part, "bytes": size} for part, size in whole],
        "line": None if line is None or not 1 <= line <= total else int(line),
        "activation_peak": None if peak is None else int(peak), "notes": list(notes),
    }  # fmt: skip


NO_SURVIVAL = "unknown: comes from the gate (docs/inside.md)"
TOO_OLD = "unknown: the plimsoll inside this engine is too old for containment"
OFF = "a step that runs out of memory ends the engine"
ARMED = "armed: requests of a step that runs out of memory are recomputed in smaller steps"
STORM = "storm: steps run out of memory again and again; drain and restart this engine"
LIMPS = "limping: far slower than before its steps ran out of memory"


def survival_of(look: Look | None) -> dict[str, Any]:
    """Returns the section of contained failures; without figures if there are none."""
    found = None if look is None or look.gate is None else look.gate.survival
    if look is None or found is None:
        return {"says": TOO_OLD if look is not None and look.gate is not None else NO_SURVIVAL, "figures": [], "last": None}
    values = [(figure, getattr(found, figure["name"])) for figure in _TABLES["survival"]]
    figures = [{**figure, "value": value, "why": "" if value is not None else "unknown"} for figure, value in values]
    off = f"{'off' if found.armed is None else 'not armed'}, {OFF}: {found.why or 'no reason given'}"
    says = STORM if found.storm else LIMPS if found.limping else ARMED if found.armed else off
    last = None
    if found.last is not None and found.contained:  # with its time: an age would change at every look
        at = None if found.last.age_s is None else round(look.unix_s - found.last.age_s)
        last = {"at": at, "says": shown(last_words(found.last))}
    return {"says": shown(says), "figures": figures if found.armed or found.contained else [], "last": last}


RUNGS = tuple(_TABLES["rungs"])
SAYS = {
    Reach.REFUSED: "connection refused", Reach.SILENT: "unreachable", Reach.NONSENSE: "invalid answer",
}  # fmt: skip
# The worst first, as they are listed.
PERSON, CRITICAL, GONE, WARNING, INFO, UNKNOWN, WELL = range(7)
STATES = ("person", "critical", "gone", "warning", "info", "unknown", "well")
_BY_SEVERITY = {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNING, Severity.INFO: INFO}


def row(facts: EngineState) -> dict[str, Any]:
    """Returns the engine's line in the fleet; a value is None where unknown."""
    view = facts.view
    rank, says = _state(facts)
    doing = facts.guarding.doing
    return {
        "id": id_of(view.name), "name": shown(view.name), "rank": rank, "state": STATES[rank], "says": shown(says),
        "model": None if view.look is None or view.look.model is None else shown(view.look.model),
        "vllm": None if view.vllm is None else shown(view.vllm),
        "kv": _rounded(facts.reading("kv_cache_usage"), 3), "running": _rounded(facts.reading("running"), 0),
        "waiting": _rounded(facts.reading("waiting"), 0), "in_flight": _rounded(facts.reading("in_flight"), 0),
        "twice": _rounded(facts.reading("twice"), 3), "rung": rung_of(facts),
        "doing": None if doing is None else f"{doing.grade}: {doing.step or ''}", "paused": facts.guarding.is_paused,
    }  # fmt: skip


def rung_of(facts: EngineState) -> str | None:
    """Returns the highest rung that an active condition calls for; None without one."""
    held = [grade_of(one.kind) for one in facts.view.holding]
    return max(held, key=RUNGS.index, default=None)


def _state(facts: EngineState) -> tuple[int, str]:
    view = facts.view
    if view.needs:
        return PERSON, view.needs
    held = sorted((_BY_SEVERITY[one.severity], str(one.code)) for one in view.findings)
    said = ", ".join(dict.fromkeys(code for _, code in held))
    worst = min((rank for rank, _ in held), default=WELL)
    if worst == CRITICAL:
        return CRITICAL, said
    if view.look is None:
        return UNKNOWN, "not looked at yet"
    if view.unreachable_since_s is not None or (view.look.reach is not Reach.ANSWERS and not view.has_answered):
        never = "" if view.has_answered else ", no answer since guard started"
        return GONE, SAYS.get(view.look.reach, "unreachable") + never
    if worst < WELL:
        return worst, said
    if view.look.reach is not Reach.ANSWERS:
        return UNKNOWN, f"the last look failed: {view.look.why}"
    return WELL, "healthy"


def _rounded(reading: Reading, digits: int) -> float | int | None:
    if isinstance(reading, Unknown) or reading != reading or abs(reading) == float("inf"):
        return None
    return round(reading, digits) if digits else round(reading)


MOST_CHANGES = 60
NO_BLOCKS = "unknown: the engine does not report the size of its cache"


def sections(facts: EngineState, clock: Clock) -> dict[str, Any]:
    """Returns all sections. Ages and durations, which change every second, are given as the time they began."""
    view, look = facts.view, facts.view.look
    return {
        "head": {
            **row(facts), "url": shown(view.url), "note": shown(view.note), "needs": shown(view.needs),
            "approval": facts.guarding.approval,
            "why": "" if look is None else shown(look.why), "looks": view.looks,
            "looked_at": None if look is None else round(look.unix_s, 1),
            "ready": None if look is None or look.gate is None else look.gate.ready,
            "drain": None if look is None or look.gate is None else shown(look.gate.drain),
            "canary": None if look is None or (canary := canary_json(look, clock)) is None else
            tidy({name: value for name, value in canary.items() if name != "age_s"}),
        },
        "figures": _figures(facts),
        "ledger": tidy(ledgers(look)),
        "survival": survival_of(look),
        "blocks": blocks(look, facts.series),
        "forecasts": {name: tidy(forecast_json(one)) for name, one in view.forecasts.items()},
        "ladder": ladder(facts),
        "findings": tidy([finding_json(one) for one in view.findings]),
        "conditions": [_condition(condition_json(view, one, clock)) for one in view.conditions],
        "changes": [_change(event) for event in list(facts.changes)[-MOST_CHANGES:]],
        "series": {name: [round(one or 0.0, 1) if name == "t" else _short(one) for one in values]
                   for name, values in facts.series.items()},
    }  # fmt: skip


def _figures(facts: EngineState) -> list[dict[str, Any]]:
    """Returns every figure with its name, and the reason where it is unknown."""
    figures = []
    for figure in _TABLES["engine"]:
        reading, about = facts.reading(figure["name"]), {name: figure[name] for name in ("name", "says", "unit")}
        if isinstance(reading, Unknown):
            figures.append({**about, "value": None, "why": shown(figure.get("unknown", f"unknown: {reading.reason}"))})
        else:
            figures.append({**about, "value": _short(reading), "why": ""})
    return figures


def blocks(look: Look | None, series: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Returns the block pool: its size, the blocks in use, and the most of the last half hour."""
    config: Mapping[str, str] = {} if look is None else look.config
    total, size = _whole(config.get("num_gpu_blocks")), _whole(config.get("block_size"))
    usage = None if look is None else look.figures.get("kv_cache_usage")
    if total is None or usage is None or not 0 <= usage <= 1:
        return {"total": total, "used": None, "most": None, "size": size, "why": NO_BLOCKS if total is None else "unknown"}
    known = [one for one in series.get("kv", ()) if one is not None and 0 <= one <= 1]
    usable = max(1, total - 1)  # the null block is never given out
    most = max([*known, usage])
    return {"total": usable, "used": round(usage * usable), "most": round(most * usable), "size": size, "why": ""}


def ladder(facts: EngineState) -> dict[str, Any]:
    """Returns every rung, with the conditions that call for it, any action in progress, and whether it is switched off."""
    guarding, called = facts.guarding, rung_of(facts)
    rungs, run = [], guarding.doing
    for name in RUNGS:
        because = [one.kind for one in facts.view.holding if grade_of(one.kind) == name]
        is_off = name != "advice" and (not guarding.is_acting or guarding.is_paused or name in guarding.rungs_off)
        mine = run if run is not None and run.grade == name else None
        rungs.append({
            "rung": name, "does": _TABLES["rungs"][name], "because": [shown(one) for one in because],
            "here": name == called, "off": is_off, "doing": None if mine is None else str(mine.step or ""),
            "undoing": mine is not None and mine.is_undoing,
        })  # fmt: skip
    return {"rungs": rungs, "acting": guarding.is_acting, "paused": guarding.is_paused, "called": called}


def _condition(found: Mapping[str, Any]) -> object:
    kept = {name: value for name, value in found.items() if name not in ("engine", "for_s")}
    return tidy({**kept, "since": None if found["since"] is None else round(found["since"])})


def _change(event: Any) -> object:
    found = event_json(event)
    finding = found["finding"]
    seen = event.condition.evidence if event.condition is not None else ()
    plain = [{"source": one.source, "line": one.line, "text": one.text} for one in seen]
    evidence = finding["evidence"] if isinstance(finding, dict) else plain
    return tidy({"at": found["at"], "what": found["what"], "sentence": found["sentence"], "evidence": evidence})


def journal(rows: Sequence[Mapping[str, Any]], engine: str | None) -> list[object]:
    """Returns journal entries, each with its sentence; leaves out those without one."""
    found = []
    for entry in rows:
        says = entry_sentence(entry)
        if says and (engine is None or entry["engine"] in (engine, "")):
            found.append(tidy({**entry, "sentence": says}))
    return found


def _short(value: float | None) -> float | None:
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.5g}")


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 12 and int(text) > 0 else None
