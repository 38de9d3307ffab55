"""Whether an engine lives: dead, stuck with work, hung while idle, starting over and over, or another one than before."""

from __future__ import annotations

import math

from plimsoll.domain.finding import Evidence
from plimsoll.domain.look import Reach
from plimsoll.domain.unknown import Unknown
from plimsoll.guard.history import History
from plimsoll.guard.policy import Policy
from plimsoll.guard.tracker import Seen, no, unknown, yes

LONGEST_STEPS = 3.0
LONGEST_STARTS = 3.0  # a start with cold caches takes longer than a warm one
KEPT_S = 1_500.0  # what the history surely holds
FRESH_S = 90.0  # a test request that is older says nothing about now


def dead(history: History, policy: Policy, now_s: float) -> Seen:
    """/health says 503, or nobody has listened for longer than a start takes. Silence is no knowledge."""
    last = history.last
    if last is None:
        return unknown("NotLookedAt", "not looked at yet")
    if last.health == 503 or (last.gate is not None and last.gate.reason == "dead"):
        return yes("HealthSaysSo", "its own /health says that its engine is dead", Evidence("health", "503"))
    if last.reach is Reach.ANSWERS:
        return no("Answers", "it answers")
    if last.reach is Reach.REFUSED and history.refused_since_s is not None:
        if history.first_answer_s is None:
            return unknown("NeverSeen", "nobody listens there, and nobody has since guard looks: starting, or never started")
        bound_s = max(policy.number("dead", "refused"), LONGEST_STARTS * history.longest_start_s)
        quiet_s = now_s - history.refused_since_s
        message = f"nobody has listened there for {quiet_s:.0f} s"
        seen = Evidence("connection", f"refused for {quiet_s:.0f} s; a start may take {bound_s:.0f} s")
        if quiet_s >= bound_s:
            return yes("NobodyListens", message, seen)
        return no("Starting", f"{message}: a start takes as long", seen)
    return unknown("Unreachable", f"it could not be asked: {last.why or last.reach}")


def wedged(history: History, policy: Policy, now_s: float) -> Seen:
    """No step for longer than the bound and three times the longest seen, with work waiting, and a test request that failed."""
    last = history.last
    if last is None or last.reach is not Reach.ANSWERS:
        return unknown("Unreachable", "it could not be asked")
    if last.gate is not None and last.gate.is_wedged:
        return yes("GateProved", "the gate's own test request got no answer while work waited", Evidence("gate", "is_wedged"))
    if _rests(history):
        return no("Paused", "it is paused or asleep: no step is due")
    work = _work(history)
    if isinstance(work, Unknown):
        return unknown("NoFigures", work.reason)
    if work <= 0:
        return no("Idle", "nothing is there to do")
    bound_s = max(policy.number("wedged", "still"), LONGEST_STEPS * history.longest_gap_s)
    made = history.rise("steps", bound_s)
    if isinstance(made, Unknown):
        still_s = None if last.gate is None else last.gate.last_step_age_s
        if still_s is None:
            return unknown("NotLongEnough", made.reason)
        if still_s < bound_s:
            return no("Steps", f"a step was made {still_s:.0f} s ago")
    elif made > 0:
        return no("Steps", f"{made:.0f} steps in the last {bound_s:.0f} s")
    if _came_to_a_hung_one(history) or now_s - history.idle_at_s < bound_s:
        return no("JustCame", f"its work came less than {bound_s:.0f} s ago, or after its last step")
    longest = f"the longest seen took {history.longest_gap_s:.1f} s"
    found = Evidence("steps", f"none in {bound_s:.0f} s with {work:.0f} requests there; {longest}")
    canary = last.canary
    if canary is None or canary.is_answered is None or now_s - canary.at_s > FRESH_S:
        return unknown("NotProved", f"{found.text}; no test request has proved it: turn the canary on, or the gate")
    if canary.is_answered:
        return no("CanaryAnswered", "its test request was answered")
    return yes("NoStep", "no step is made though work waits, and a test request got no answer", found)


def hung(history: History, policy: Policy, now_s: float) -> Seen:
    """An engine with nothing to do that answers no test request: only the test shows it."""
    last = history.last
    if last is None or last.reach is not Reach.ANSWERS:
        return unknown("Unreachable", "it could not be asked")
    canary = last.canary
    if canary is None or now_s - canary.at_s > FRESH_S:
        return unknown("NoCanary", "only a test request can show this, and none is made")
    if canary.is_answered is None:
        return unknown("CanaryNotMade", "the test request could not be made")
    if canary.is_answered or _rests(history):
        return no("CanaryAnswered", "its test request was answered" if canary.is_answered else "it is paused or asleep")
    wanted, since_s = policy.number("hung", "canaries"), history.failing_since_s
    if history.failed_canaries < wanted or since_s is None:
        return no("Watching", f"{history.failed_canaries} of {wanted:.0f} test requests without an answer")
    work = _work(history)
    if isinstance(work, Unknown):
        return unknown("NoFigures", work.reason)
    made = history.rise("steps", min(now_s - since_s, KEPT_S))
    if isinstance(made, Unknown):
        return unknown("NotLongEnough", made.reason)
    if made > 0:
        return no("Steps", "steps are made: it is busy, not stuck")
    if work > 0 and not _came_to_a_hung_one(history):
        return no("HasWork", "it stopped with work there: whether it is wedged is another question")
    return yes(
        "IdleAndSilent", f"{history.failed_canaries} test requests in a row got no answer, and no step was made meanwhile",
        Evidence("canary", f"{history.failed_canaries} without an answer, {work:.0f} requests on the page"),
    )  # fmt: skip


def crash_loop(history: History, policy: Policy, now_s: float) -> Seen:
    """Several starts in a short time, whoever made them."""
    del now_s
    last = history.last
    if last is None:
        return unknown("NotLookedAt", "not looked at yet")
    over_s, least = policy.number("loop", "over"), policy.number("loop", "starts")
    recent = [at for at in history.starts if abs(last.unix_s - at) <= over_s]
    if len(recent) < least:
        if last.reach not in (Reach.ANSWERS, Reach.REFUSED):
            return unknown("Unreachable", "it could not be asked: what it does now is not known")
        return no("Settled", f"{len(recent)} starts in the last {over_s / 60:.0f} min")
    message = f"it was started {len(recent)} times in {over_s / 60:.0f} min"
    return yes("StartsAgain", message, Evidence("process_start_time_seconds", message))


def changed(history: History, policy: Policy, now_s: float) -> Seen:
    """The last restart brought another version or other settings."""
    clear_s = policy.number("changed", "clear")
    if history.last is None:
        return unknown("NotLookedAt", "not looked at yet")
    if history.changed and now_s - history.changed_at_s < clear_s:
        return yes("AnotherOne", f"since its last start {history.changed}", Evidence("page", history.changed))
    if history.last.reach not in (Reach.ANSWERS, Reach.REFUSED):
        return unknown("Unreachable", "it could not be asked")
    return no("AsBefore", "as before")


def _rests(history: History) -> bool:
    last = history.last
    if last is None:
        return False
    is_asleep = last.gate is not None and bool(last.gate.asleep)
    return is_asleep or bool(last.is_paused) or last.figures.get("asleep", 0.0) > 0


def _work(history: History) -> float | Unknown:
    """Requests that are with the engine: the gate's own count, else what the page says.

    Where somebody who could tell that it rests has told before and does not now, there may be none that it should serve. A gate
    that answers tells it alone: vLLM's own /is_paused asks the engine core, and a stuck one does not answer.
    """
    lost = history.lost
    has_gate = history.last is not None and history.last.gate is not None
    if lost and not (has_gate and lost == "pause"):
        return Unknown(f"the {lost} told before whether it rests, and does not now")
    own = history.now("engine_requests")
    if not isinstance(own, Unknown):
        return own
    running, waiting = history.now("running"), history.now("waiting")
    if isinstance(running, Unknown):
        return running
    return waiting if isinstance(waiting, Unknown) else running + waiting


def _came_to_a_hung_one(history: History) -> bool:
    """Whether what is there came after the last step: the engine stopped while it had nothing to do."""
    step_at_s = -math.inf if history.step_at_s is None else history.step_at_s
    return history.idle_at_s > -math.inf and step_at_s <= history.idle_at_s
