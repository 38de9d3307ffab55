"""What is asked of an engine after it was started: whether it is ready, whether its cache suffices, whether it is well."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.doctor.metrics_remedies import cache_tokens
from plimsoll.domain.condition import Condition
from plimsoll.domain.look import Look, Reach
from plimsoll.domain.outcome import Outcome, done, failed
from plimsoll.guard.decide import ASKED
from plimsoll.guard.policy import GRADES

HEALTHY = 200
CLOCK_S = 5.0  # by so much the beginning of one and the same process may seem to move, when the wall clock is set
LOWER = 0.95  # of what the last start had, below which it is worth a word


def is_ready(look: Look | None) -> bool:
    """It answers its page and its health, and its gate, where it has one, would let a balancer send."""
    if look is None or look.reach is not Reach.ANSWERS or look.health != HEALTHY:
        return False
    # The gate of a guard's own drain says "draining": that is ours to end, and no want of readiness.
    return look.gate is None or look.gate.ready or look.gate.reason == "draining"


def kv_tokens(look: Look | None) -> float | None:
    """How many tokens its KV cache holds, as it says itself."""
    return None if look is None else cache_tokens(look.config)


def was_restarted(look: Look | None, before: object) -> bool:
    """Whether it began later than it says it had before; False where either is not known."""
    began = None if look is None else look.started_unix_s
    return began is not None and isinstance(before, int | float) and began > before + CLOCK_S


def enough_cache(look: Look | None, context: float | None, before: object) -> Outcome:
    """Held back only where the longest request that it lets in does not fit; less than at the last start is told."""
    tokens = kv_tokens(look)
    if tokens is None:
        return done("how large its KV cache is, it does not say: not compared")
    if context is not None and tokens < context:
        return failed(f"its KV cache holds {tokens:,.0f} tokens, and it lets in requests of {context:,.0f}", kv_tokens=tokens)
    if isinstance(before, int | float) and tokens < LOWER * before:
        return done(f"its KV cache holds {tokens:,.0f} tokens, {before:,.0f} at its last start", kv_tokens=tokens, is_less=True)
    return done(f"its KV cache holds {tokens:,.0f} tokens", kv_tokens=tokens)


def troubles(kind: str, conditions: Mapping[str, Condition]) -> frozenset[str]:
    """Which of the conditions hold that speak against a restart: its own, and those that lead to one."""
    return frozenset(name for name in _speaking(kind) if same_trouble(kind, conditions, only=name))


def _speaking(kind: str) -> tuple[str, ...]:
    # That it was started often is no news to whoever asked for one more start.
    return (kind, "dead", "wedged", "hung", *(() if kind == ASKED else ("loop",)))


def same_trouble(
    kind: str, conditions: Mapping[str, Condition], *, only: str = "", spared: frozenset[str] = frozenset()
) -> str:
    """Why a restart did not help: the same condition holds again, or one that leads to a restart; "" while neither does.

    `spared` are those that held when it came back: what was said of the old process is over a while later.
    """
    for name in (only,) if only else _speaking(kind):
        if name in spared:
            continue
        condition = conditions.get(name)
        if condition is not None and condition.is_true and (name in GRADES or name == "loop"):
            return condition.message
    return ""
