"""From a condition that holds to what a person reads: the code, the cause in one line, what helps and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from plimsoll.doctor.remedies.runtime import KV_NOT_REMEDIES, cache_tokens, kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.doctor.rules.contained import NOT_REMEDIES, remedies_of
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.tracker import Assessment, no, unknown, yes
from plimsoll.unknown import Condition

PLAN = "plan"  # the kind of the question whether the start was as planned; asked only where a plan is known
_ORDER = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


class _Kind(NamedTuple):
    code: Code
    severity: Severity
    confidence: float
    title: str
    remedy: Callable[[Look | None], tuple[Remedy, ...]]
    not_a_remedy: tuple[str, ...] = ()


def _always(*remedies: Remedy) -> Callable[[Look | None], tuple[Remedy, ...]]:
    return lambda _: remedies


def _cache(look: Look | None) -> tuple[Remedy, ...]:
    return kv_remedies(look.config if look is not None else {}, _lengths(look))


def _queue(look: Look | None) -> tuple[Remedy, ...]:
    figures: Mapping[str, float] = look.figures if look is not None else {}
    return saturated_remedies(figures.get("running", 0.0), figures.get("kv_cache_usage", 0.0))


def _survived(look: Look | None) -> tuple[Remedy, ...]:
    return remedies_of(None if look is None or look.gate is None else look.gate.survival)


def _lengths(look: Look | None) -> dict[str, float]:
    """The figures, with the mean lengths of requests since the engine's start."""
    if look is None:
        return {}
    figures = dict(look.figures)
    ended = figures.get("success", 0.0)
    if ended > 0:
        for ours, total in (("prompt_length_mean", "prompt_tokens"), ("output_length_mean", "generation_tokens")):
            if total in figures:
                figures[ours] = figures[total] / ended
    return figures


_RESTART_LATER = Remedy(
    "drain this replica and restart it, when the others can carry its load", "nothing else brings this memory back"
)
_RESTART_LIMPING = Remedy(
    "drain this replica and restart it, when the others can carry its load; with another setting below, or it limps again",
    "a fresh start has its full steps, and memory that is not in pieces",
)
_ROOM = Remedy(
    "lower --gpu-memory-utilization by what is missing, at the next restart",
    "costs as much KV cache and nothing else", "--gpu-memory-utilization",
)  # fmt: skip
_NOT_THE_CACHE = "/reset_prefix_cache: it lies inside the KV cache, whose size never changes"
_NOT_A_FASTER_RESTART = "restarting it by hand while a supervisor does: two of them are worse than one"

_KINDS: Mapping[str, _Kind] = {
    "dead": _Kind(
        Code.ENGINE_DEAD, Severity.CRITICAL, 0.95, "the engine is dead",
        _always(
            Remedy("read the end of its log (plimsoll doctor LOG)", "the reason is printed before the engine goes"),
            Remedy("restart on any exit, also on exit code 0", "vLLM exits with 0 when its engine dies"),
        ),
        ("waiting: a dead engine never comes back by itself", "/health 200 from a proxy in front: ask the engine itself"),
    ),
    "wedged": _Kind(
        Code.ENGINE_WEDGED, Severity.CRITICAL, 0.95, "the engine has work and makes no step", lambda _: wedge_remedies(),
        ("memory settings, resetting caches, aborting requests: the loop that would obey stands still",
         "a liveness probe on /health: it stays 200"),
    ),
    "hung": _Kind(
        Code.ENGINE_WEDGED, Severity.CRITICAL, 0.9, "the engine is idle and answers no request", lambda _: wedge_remedies(),
        ("waiting for traffic to wake it: the canary requests were traffic", "a liveness probe on /health: it stays 200"),
    ),
    "stalled": _Kind(
        Code.ENGINE_STALLED, Severity.CRITICAL, 0.7, "the engine looks stuck, and nothing has proved it",
        _always(
            Remedy("send it one request by hand: curl /v1/completions with max_tokens 1", "an answer proves that it lives"),
            Remedy("turn guard's canary requests on (canary), or start vLLM with the gate", "then guard proves it by itself"),
            *wedge_remedies(),
        ),
        ("a liveness probe on /health: it stays 200",),
    ),
    "slow": _Kind(
        Code.ENGINE_SLOW, Severity.WARNING, 0.8, "one token takes long", _queue,
        ("a restart: it comes back to the same load", "a longer deadline of the canary request: users wait as long"),
    ),
    "garbage": _Kind(
        Code.ENGINE_GARBAGE, Severity.CRITICAL, 0.7, "the engine's answers are not text",
        _always(
            Remedy("ask it by hand, at temperature 0, and compare with another replica", "one odd token proves little"),
            Remedy("look at the card: Xid, ECC, dmesg (plimsoll doctor DMESG)", "a sick card computes wrong before it fails"),
            Remedy("take it out of the balancer and restart it, on another card if that one is in doubt",
                   "wrong weights in memory stay until they are loaded again"),
        ),
        ("memory settings: what it computes is wrong, not how much fits",),
    ),
    "saturated": _Kind(
        Code.ENGINE_SATURATED, Severity.WARNING, 0.9, "more requests come than it can serve", _queue,
        ("a restart: it loses the queue and comes back to the same load", _NOT_THE_CACHE),
    ),
    "storm": _Kind(
        Code.KV_PREEMPTION_STORM, Severity.WARNING, 0.9, "requests are preempted and recomputed", _cache,
        KV_NOT_REMEDIES,
    ),
    "backlog": _Kind(
        Code.KV_SATURATED, Severity.WARNING, 0.8, "the KV cache is full and requests wait for it", _cache, KV_NOT_REMEDIES
    ),
    "retries": _Kind(
        Code.ALLOCATOR_FRAGMENTATION, Severity.WARNING, 0.8, "allocations fail at first",
        _always(
            Remedy("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then restart",
                   "segments grow instead of being cut; not with a KV connector"),
            _ROOM,
        ),
        ("emptying torch's cache: torch does so itself before it tries again", _NOT_THE_CACHE),
    ),
    "growth": _Kind(
        Code.GPU_GROWTH, Severity.WARNING, 0.6, "GPU memory grows and nothing gives it back",
        _always(
            Remedy("send the longest prompt you allow once, and look again",
                   "a staircase that ends at the longest prompt is no leak"),
            _ROOM, _RESTART_LATER,
        ),
        (_NOT_THE_CACHE, "a restart by the clock: restart on allocation retries"),
    ),
    "exhausted": _Kind(
        Code.GPU_GROWTH, Severity.CRITICAL, 0.9, "GPU memory grows, and allocations fail already",
        _always(_RESTART_LATER, _ROOM),
        ("emptying torch's cache: torch does so itself before it tries again", _NOT_THE_CACHE),
    ),
    "slack": _Kind(
        Code.GPU_THIN_SLACK, Severity.WARNING, 0.8, "the card has almost no spare memory",
        _always(
            _ROOM,
            Remedy("bound the largest step with a smaller --max-num-batched-tokens", "costs time to first token",
                   "--max-num-batched-tokens"),
        ),
        ("emptying torch's cache: there is next to nothing in it", "a restart with the same settings"),
    ),
    "neighbour": _Kind(
        Code.RUNTIME_NEIGHBOUR, Severity.WARNING, 0.8, "another process needs memory on the card",
        _always(
            Remedy("move the other process to another GPU, or bound its memory", "vLLM keeps no reserve for neighbours"),
            Remedy("let the workers give back what torch does not use (the gate's /plimsoll/compact)",
                   "milliseconds of one step, and only what is fully free goes back"),
        ),
        ("--max-num-seqs, --max-model-len: this server uses what it was given", _NOT_THE_CACHE),
    ),
    "contained": _Kind(
        Code.RUNTIME_CONTAINED, Severity.WARNING, 0.9, "steps ran out of GPU memory, and the server survived them", _survived,
        NOT_REMEDIES,
    ),
    "limping": _Kind(
        Code.RUNTIME_CONTAINED, Severity.WARNING, 0.95, "steps run out of GPU memory, and the server hardly works any more",
        lambda look: (_RESTART_LIMPING, *_survived(look)), NOT_REMEDIES,
    ),
    "host": _Kind(
        Code.HOST_GROWTH, Severity.WARNING, 0.7, "the host's memory grows",
        _always(
            Remedy("look whose it is: resident memory of the API server, of EngineCore and of each worker",
                   "each has its own cures; the page has them"),
            _RESTART_LATER,
        ),
        ("GPU memory settings: this is the host's", "a higher limit alone: it is reached later"),
    ),
    "card": _Kind(
        Code.OTHER_HARDWARE, Severity.CRITICAL, 0.9, "the card reports errors",
        _always(
            Remedy("take the card out of service: no new server onto it", "a restart onto a sick card fails again, or lies"),
            Remedy("read the kernel's log: dmesg | plimsoll doctor -", "each Xid has a meaning and a next step of its own"),
        ),
        ("restarting the engine onto the same card", "any setting of vLLM"),
    ),
    "prefix": _Kind(
        Code.PREFIX_CACHE_LOW_HIT_RATE, Severity.INFO, 0.9, "the prefix cache has almost no hits",
        _always(
            Remedy("put what all prompts share at their beginning, letter for letter", "only equal beginnings are found"),
            Remedy("send requests that share a beginning to the same replica", "each replica has a cache of its own"),
        ),
        ("switching prefix caching off to save memory: it saves none",),
    ),
    "loop": _Kind(
        Code.ENGINE_CRASH_LOOP, Severity.CRITICAL, 0.95, "it starts, fails and is started again",
        _always(
            Remedy("stop the loop and keep the log of the first failure", "later rounds often fail of its leftovers"),
            Remedy("plimsoll doctor on that log", "the first error is the cause"),
        ),
        ("faster restarts", _NOT_A_FASTER_RESTART),
    ),
    "changed": _Kind(
        Code.ENGINE_CHANGED, Severity.INFO, 1.0, "it is not what it was before its last start",
        _always(
            Remedy("if nobody meant it, pin the image by its digest and the flags in version control",
                   "what changes by itself changes again"),
        ),
        ("restarting: it starts the same thing again",),
    ),
    PLAN: _Kind(
        Code.STARTUP_DIFFERS_FROM_PLAN, Severity.INFO, 0.9, "it started with another KV cache than was planned",
        _always(
            Remedy("compare the command that runs with the one that was planned, and look for other processes on the card",
                   "the plan holds for one command on an empty card"),
            Remedy("let the plan learn from the start's log (docs/learn.md)", "the next plan starts from what was measured"),
        ),
        ("restarting without looking",),
    ),
}  # fmt: skip


def finding(condition: Condition, look: Look | None = None) -> Finding | None:
    """What a condition that holds means; None if it does not hold, and for a rule of the user's own."""
    kind = _KINDS.get(condition.kind)
    if kind is None or not condition.is_true:
        return None
    return Finding(
        kind.code, kind.severity, kind.confidence, kind.title, condition.message, condition.evidence, kind.remedy(look),
        kind.not_a_remedy,
    )  # fmt: skip


def findings(conditions: Iterable[Condition], look: Look | None = None) -> tuple[Finding, ...]:
    """Each code once, by its most severe condition; the worst first."""
    best: dict[Code, Finding] = {}
    for condition in conditions:
        found = finding(condition, look)
        if found is not None and (found.code not in best or _rank(found) < _rank(best[found.code])):
            best[found.code] = found
    return tuple(sorted(best.values(), key=_rank))


def code_of(kind: str) -> Code | None:
    """The code under which a condition is told; None for a rule of the user's own."""
    found = _KINDS.get(kind)
    return None if found is None else found.code


def severity_of(kind: str) -> Severity:
    """How soon a person should look; a rule of the user's own only informs."""
    found = _KINDS.get(kind)
    return Severity.INFO if found is None else found.severity


def _rank(found: Finding) -> tuple[int, float]:
    return _ORDER.index(found.severity), -found.confidence


class PlannedTokens(NamedTuple):
    """What the plan of an engine says of its KV cache, in tokens, with the plan's own band."""

    tokens: float
    low: float
    high: float


def as_planned(planned: PlannedTokens, look: Look | None) -> Assessment:
    """Whether the KV cache that the engine says it has lies in the band of its plan."""
    tokens = cache_tokens(look.config) if look is not None else None
    if tokens is None:
        return unknown("NotOnThePage", "the engine does not report its KV cache size")
    text = f"{tokens:,.0f} tokens of KV cache; planned were {planned.tokens:,.0f} ({planned.low:,.0f} to {planned.high:,.0f})"
    if planned.low <= tokens <= planned.high:
        return no("AsPlanned", text)
    return yes("DiffersFromPlan", text, Evidence("vllm:cache_config_info", text))
