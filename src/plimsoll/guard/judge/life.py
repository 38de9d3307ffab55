"""Judges whether an engine lives: dead, wedged, hung, stalled, slow, garbled, crash-looping, changed, or limping on."""

from __future__ import annotations

import math

from plimsoll.doctor.rules.contained import Survival, cost_words, last_words
from plimsoll.findings import Evidence
from plimsoll.guard.judge.history import SURELY_S, CoreSteps, History
from plimsoll.guard.judge.look import Canary, Look, Reach, is_resting
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.judge.tracker import WORST, Assessment, no, unknown, yes
from plimsoll.guard.judge.witness import is_direct
from plimsoll.unknown import Status, Unknown

# A contained failure alone is reported and never acted on. A server that limps, or fails again and again, is restarted.

UNREACHABLE = unknown("Unreachable", "unreachable")
SOURCE = "plimsoll_survive_contained_total"
OFF = "a step that runs out of memory ends the engine"


def contained(history: History, policy: Policy, look: Look) -> Assessment:
    """A step ran out of memory lately and was contained. One run of failures is one condition: until none came for a while."""
    found = _survival(look)
    if isinstance(found, Assessment):
        return found
    if found.contained is None:
        return unknown("NoCount", "the gate does not report the number of contained failures")
    over_s = policy.number("contained", "over")
    rose = history.since("contained", over_s).rise
    age_s = None if found.last is None else found.last.age_s
    if rose > 0:
        first = f"{_steps(rose)} ran out of memory in the last {over_s / 60:.0f} min and the engine lives"
    elif found.contained > 0 and age_s is not None and age_s <= over_s:  # before guard's first look at this process
        first = f"{_steps(found.contained)} ran out of memory since it began, the last {age_s:.0f} s ago, and the engine lives"
    elif not found.armed:
        state = "off" if found.armed is None else "not armed"
        return unknown("NotArmed", f"containment is {state}, {OFF}: {found.why or 'the gate does not say why'}")
    else:
        return no("NoneLately", f"no step ran out of memory in the last {over_s / 60:.0f} min")
    last = last_words(found.last)
    text = "; ".join([first, *([f"the last: {last}"] if last else []), *cost_words(found)])
    return yes("Contained", text, Evidence(SOURCE, f"{found.contained:.0f} since the start"))


def _steps(count: float) -> str:
    return "1 step" if count == 1 else f"{count:.0f} steps"


def limping(_history: History, _policy: Policy, look: Look) -> Assessment:
    """The server itself reports that it is far slower than it was, or fails too often: only a restart mends that."""
    found = _survival(look)
    if isinstance(found, Assessment):
        return found
    if found.storm is None or found.limping is None:
        return unknown("NotTold", "the gate does not report whether it limps")
    if found.storm:
        count = "" if found.contained is None else f": {found.contained:.0f} in all"
        return yes("Storm", f"steps run out of memory again and again{count}", Evidence("gate", "storm"))
    if found.limping:
        text = "; ".join(["it is far slower than before its steps ran out of memory", *cost_words(found)])
        return yes("Limps", text, Evidence("gate", "limping"))
    return no("AtSpeed", "it neither limps nor fails again and again")


def recomputes(history: History, policy: Policy, look: Look) -> Assessment | None:
    """Returns that it is not stuck if a step was contained lately: its loop lives, and computes again; else None."""
    if look.reach is not Reach.ANSWERS:
        return None
    still_s = policy.number("wedged", "still")
    found = None if look.gate is None else look.gate.survival
    newest = None if found is None or not found.contained else found.last
    is_young = newest is not None and newest.age_s is not None and newest.age_s < still_s
    if not is_young and history.since("contained", still_s).rise <= 0:
        return None
    return no("Recomputes", f"a step ran out of memory less than {still_s:.0f} s ago, and its requests are computed again")


def _survival(look: Look) -> Survival | Assessment:
    if look.reach is not Reach.ANSWERS:
        return UNREACHABLE
    if look.gate is None:
        return unknown("NoGate", "only the gate's state tells this (docs/inside.md)")
    return look.gate.survival or unknown("TooOld", "the plimsoll inside it does not know of containment")


LONGEST_STEPS = 3.0
LONGEST_STARTS = 3.0  # a start with cold caches takes longer than a warm one
FRESH_S = 90.0  # a canary request that is older says nothing about now
FIRST_STEP_S = 600.0
OLD_PAGE = "nothing on the metrics page proves that it is fresh: a proxy may serve an old one"
CORE_CANARIES = 2  # failures before one core of several counts as stuck
FRESH_LOOKS = 4.0  # where guard looks more rarely
CONTRADICTS_S = 45.0  # an older step or canary answer does not contradict a bad /health


def dead(history: History, policy: Policy, look: Look) -> Assessment:
    """/health answers 503, or the port has been closed for longer than a start takes. A missing answer proves nothing."""
    if look.ended and look.reach is not Reach.ANSWERS:
        return yes("ProcessEnded", look.ended, Evidence("process", look.ended))
    if look.gate is not None and look.gate.reason == "dead" and is_direct(look) is not False:
        return yes("GateSaysSo", "its gate reports a dead engine", Evidence("gate", "dead"))
    if look.health == 503:
        if works := _works_all_the_same(history, look):
            return unknown("Contradicted", f"/health returns 503, but {works}")
        return yes("HealthSaysSo", "its /health reports a dead engine", Evidence("health", "503"))
    if look.reach is Reach.ANSWERS:
        return no("Answers", "it answers")
    if look.gone and history.gone_since_s is not None and (history.first_answer_s is not None or look.has_served):
        # No reason is known: a person may have stopped it, and gets some time to say so.
        bound_s, gone_s = policy.number("dead", "unexplained"), look.at_s - history.gone_since_s
        message = f"{look.gone}, and nobody says why, for {gone_s:.0f} s"
        if gone_s >= bound_s:
            return yes("Unexplained", message, Evidence("process", look.gone))
        return no("NotRunning", f"{message}: a person may have stopped it", Evidence("process", look.gone))
    if look.reach is Reach.REFUSED and history.refused_since_s is not None:
        if history.first_answer_s is None and not look.has_served:
            return unknown("NeverSeen", "connection refused since guard started: still starting, or never started")
        bound_s = max(policy.number("dead", "refused"), LONGEST_STARTS * history.longest_start_s)
        quiet_s = look.at_s - history.refused_since_s
        message = f"connection refused for {quiet_s:.0f} s"
        seen = Evidence("connection", f"refused for {quiet_s:.0f} s; a start may take {bound_s:.0f} s")
        if quiet_s >= bound_s:
            return yes("NobodyListens", message, seen)
        return no("Starting", f"{message}: a start may take that long", seen)
    return unknown("Unreachable", f"unreachable: {look.why or look.reach}")


def _works_all_the_same(history: History, look: Look) -> str:
    """Returns what contradicts a bad /health: the gate of the same process, a recent step or canary answer; else ""."""
    since_s = history.said_dead_since_s
    if since_s is None:
        return ""
    if look.gate is not None and look.gate.ready and is_direct(look) is not False:
        return "its gate says that it is ready"
    since_s = max(since_s, look.at_s - CONTRADICTS_S)
    stepped = any((pulse.step_at_s or -math.inf) > since_s for _, pulse in history.cores)
    return "the engine makes steps or answers" if stepped or history.canary_answered_at_s > since_s else ""


def wedged(history: History, policy: Policy, look: Look) -> Assessment:
    """No step for longer than the bound and three times the longest seen while requests wait, and a failed canary request."""
    if look.reach is not Reach.ANSWERS:
        return UNREACHABLE
    if (busy := recomputes(history, policy, look)) is not None:
        return busy
    if look.gate is not None and look.gate.is_wedged and is_direct(look) is not False:
        return yes("GateProved", "the gate's canary request got no answer while requests waited", Evidence("gate", "is_wedged"))
    if is_resting(look):
        return no("Paused", "paused or asleep: no step is due")
    if doubt := _may_rest(history, look):
        return unknown("MayRest", doubt)
    found = [_stands_still(history, name, pulse, policy, look) for name, pulse in history.cores]
    # The worst core decides: one may be stuck while the others work.
    return min(found, key=lambda seen: WORST.index(seen.status), default=unknown("NoFigures", "no core is on the page"))


def _stands_still(history: History, name: str, pulse: CoreSteps, policy: Policy, look: Look) -> Assessment:
    whose, now_s = f"core {name}: " if name else "", look.at_s
    work = pulse.work
    if work is None:
        return unknown("NoFigures", f"{whose}the number of requests is not on the page")
    if work <= 0:
        return no("Idle", f"{whose}no requests")
    bound_s = max(policy.number("wedged", "still"), LONGEST_STEPS * pulse.longest_gap_s)
    has_stepped = pulse.has_stepped(now_s, bound_s)
    if isinstance(has_stepped, Unknown):
        return unknown("NotLongEnough", f"{whose}{has_stepped.reason}")
    if has_stepped:
        return no("Steps", f"{whose}a step was made in the last {bound_s:.0f} s")
    if pulse.came_after_last_step or now_s - pulse.work_since_s < bound_s:
        return no("JustCame", f"{whose}its requests came less than {bound_s:.0f} s ago, or after its last step")
    longest = f"the longest seen took {pulse.longest_gap_s:.1f} s"
    found = Evidence("steps", f"{whose}none in {bound_s:.0f} s with {work:.0f} requests there; {longest}")
    canary, is_one = look.canary, not name
    if canary is None or canary.is_answered is None or now_s - canary.at_s > fresh_s(history):
        return unknown("NotProved", f"{found.text}; no canary request has proved it{_why(canary)}")
    if canary.is_answered and is_one:
        return no("CanaryAnswered", "canary request answered")
    # A canary request reaches one of several cores, and another may answer: two must have failed since, the last among them.
    since_s = -math.inf if pulse.step_at_s is None else pulse.step_at_s
    if not is_one and (canary.is_answered or sum(at_s > since_s for at_s in history.canary_failures) < CORE_CANARIES):
        return unknown("NotProved", f"{found.text}; too few canary requests have failed since")
    if not history.is_page_fresh(bound_s):
        return unknown("OldPage", OLD_PAGE)
    return yes("NoStep", f"{whose}no step while requests wait, and a canary request got no answer", found)


def _why(canary: Canary | None) -> str:
    if canary is not None and canary.why:
        return f": {canary.why}"
    return ": turn the canary on, or the gate" if canary is None else ""


def fresh_s(history: History) -> float:
    """Returns the age in seconds up to which a canary request still counts."""
    return max(FRESH_S, FRESH_LOOKS * history.every_s)


def hung(history: History, policy: Policy, look: Look) -> Assessment:
    """An engine with nothing to do that answers no canary request: only that request shows it."""
    if look.reach is not Reach.ANSWERS:
        return UNREACHABLE
    canary, now_s = look.canary, look.at_s
    if canary is None or now_s - canary.at_s > fresh_s(history):
        return unknown("NoCanary", "only a canary request can show this, and none is sent")
    if canary.is_answered is None:
        return unknown("CanaryNotMade", f"the canary request proved nothing{_why(canary)}")
    if canary.is_answered or is_resting(look):
        return no("CanaryAnswered", "canary request answered" if canary.is_answered else "paused or asleep")
    if (busy := recomputes(history, policy, look)) is not None:
        return busy
    wanted, since_s = policy.number("hung", "canaries"), history.failing_since_s
    if history.failed_canaries < wanted or since_s is None:
        return no("Watching", f"{history.failed_canaries} of {wanted:.0f} canary requests unanswered")
    if doubt := _may_rest(history, look):
        return unknown("MayRest", doubt)
    cores = history.cores
    if len(cores) != 1:
        return unknown("SeveralCores", "several cores: which one got the canary request is unknown")
    pulse = cores[0][1]
    if pulse.work is None:
        return unknown("NoFigures", "the number of requests is not on the page")
    has_stepped = pulse.has_stepped(now_s, min(now_s - since_s, SURELY_S))
    if isinstance(has_stepped, Unknown):
        return unknown("NotLongEnough", has_stepped.reason)
    if has_stepped:
        return no("Steps", "it makes steps: busy, not stuck")
    if not pulse.has_ever_stepped and now_s - since_s < FIRST_STEP_S:
        return no("NotWarm", "no step yet: the first one may compile for minutes")
    if not history.is_page_fresh(now_s - since_s):
        return unknown("OldPage", OLD_PAGE)
    if pulse.work > 0 and not pulse.came_after_last_step:
        return no("HasWork", "it stopped with requests waiting: see `wedged`")
    return yes(
        "IdleAndSilent", f"{history.failed_canaries} canary requests in a row got no answer, and no step was made meanwhile",
        Evidence("canary", f"{history.failed_canaries} without an answer, {pulse.work:.0f} requests on the page"),
    )  # fmt: skip


def stalled(history: History, policy: Policy, look: Look) -> Assessment:
    """It looks stuck, proved or not: no step while requests wait, or canary requests without an answer.

    `wedged` and `hung` need proof. This one serves where there is no canary, several cores, or a page without the figures.
    """
    still_s, now_s = policy.number("wedged", "still"), look.at_s
    if look.reach is not Reach.ANSWERS and history.failed_canaries == 0:
        return UNREACHABLE
    if is_resting(look):
        # A paused core answers /is_paused at once, a hanging one does not: the gate goes on reporting its last answer.
        since_s = history.pause_unanswered_since_s
        if since_s is not None and now_s - since_s >= still_s and any((pulse.work or 0) > 0 for _, pulse in history.cores):
            text = f"paused, requests wait, and its core has not answered /is_paused for {now_s - since_s:.0f} s"
            return yes("SilentPause", text, Evidence("pause", text))
        return no("Paused", "paused or asleep: no step is due")
    if (busy := recomputes(history, policy, look)) is not None:
        return busy
    wanted, failed = policy.number("hung", "canaries"), history.failed_canaries
    canary = look.canary
    is_late = canary is not None and failed >= wanted and now_s - canary.at_s <= fresh_s(history)
    # If every core has made a step since canary requests began to fail, the engine is busy and they wait.
    since_s = history.failing_since_s
    all_step = (
        since_s is not None
        and look.reach is Reach.ANSWERS
        and all(
            pulse.has_stepped(now_s, min(now_s - since_s, max(still_s, LONGEST_STEPS * pulse.longest_gap_s))) is True
            for _, pulse in history.cores
        )
    )
    if is_late and not all_step:
        text = f"{failed} canary requests in a row got no answer"
        seen = yes("NoAnswer", text, Evidence("canary", text))
    elif look.reach is not Reach.ANSWERS:
        return UNREACHABLE
    else:
        found = [_no_step(name, pulse, policy, now_s) for name, pulse in history.cores]
        seen = min(found, key=lambda seen: WORST.index(seen.status), default=unknown("NoFigures", "no core is on the page"))
    if seen.status is Status.TRUE and Status.TRUE in (one(history, policy, look).status for one in (wedged, hung)):
        return no("Proved", "proved: see `wedged` or `hung`")
    return seen


def _no_step(name: str, pulse: CoreSteps, policy: Policy, now_s: float) -> Assessment:
    whose = f"core {name}: " if name else ""
    if pulse.work is None:
        return unknown("NoFigures", f"{whose}the number of requests is not on the page")
    bound_s = max(policy.number("wedged", "still"), LONGEST_STEPS * pulse.longest_gap_s)
    if now_s - pulse.work_since_s < bound_s:
        return no("Works", f"{whose}no work has waited for {bound_s:.0f} s")
    has_stepped = pulse.has_stepped(now_s, bound_s)
    if isinstance(has_stepped, Unknown):
        return unknown("NotLongEnough", f"{whose}{has_stepped.reason}")
    if has_stepped:
        return no("Steps", f"{whose}a step was made in the last {bound_s:.0f} s")
    text = f"{whose}no step in {bound_s:.0f} s with {pulse.work:.0f} requests there"
    return yes("NoStep", text, Evidence("steps", text))


def slow(history: History, policy: Policy, look: Look) -> Assessment:
    """Canary requests are answered slowly: every user waits as long for a first token."""
    canary, bound_s = _answer(history, look), policy.number("slow", "takes")
    if isinstance(canary, Assessment):
        return canary
    if canary.seconds is None:
        return unknown("NoTime", "the canary request's duration is unknown")
    text = f"a one-token canary request took {canary.seconds:.1f} s"
    if canary.seconds > bound_s:
        return yes("TakesLong", text, Evidence("canary", text))
    return no("Quick", text)


def garbage(history: History, _policy: Policy, look: Look) -> Assessment:
    """Canary requests are answered with garbage: the engine lives, and computes wrong results."""
    canary = _answer(history, look)
    if isinstance(canary, Assessment):
        return canary
    if canary.is_garbage:
        return yes("NoText", "its answer to a canary request is not text", Evidence("canary", "an answer that is no text"))
    return no("Text", "its answer to a canary request is text")


def _answer(history: History, look: Look) -> Canary | Assessment:
    """Returns the last canary request if it was answered lately; else an assessment that says why not."""
    canary = look.canary
    if canary is None or look.at_s - canary.at_s > fresh_s(history):
        return unknown("NoCanary", "only a canary request can show this, and none is sent")
    if not canary.is_answered:
        return unknown("NoAnswer", f"the canary request is unanswered{_why(canary)}")
    return canary


def crash_loop(history: History, policy: Policy, look: Look) -> Assessment:
    """Several starts in a short time, by guard or anybody else."""
    over_s, least = policy.number("loop", "over"), policy.number("loop", "starts")
    starts = history.lives.since(look.at_s - over_s)
    if starts < least:
        if look.reach not in (Reach.ANSWERS, Reach.REFUSED):
            return unknown("Unreachable", "unreachable: its current state is unknown")
        return no("Settled", f"{starts} starts in the last {over_s / 60:.0f} min")
    message = f"started {starts} times in {over_s / 60:.0f} min"
    return yes("StartsAgain", message, Evidence("process_start_time_seconds", message))


def changed(history: History, policy: Policy, look: Look) -> Assessment:
    """The last restart brought another version or other settings."""
    clear_s = policy.number("changed", "clear")
    if history.changed and look.at_s - history.changed_at_s < clear_s:
        return yes("AnotherOne", f"since its last start {history.changed}", Evidence("page", history.changed))
    if look.reach not in (Reach.ANSWERS, Reach.REFUSED):
        return UNREACHABLE
    return no("AsBefore", "as before")


def _may_rest(history: History, look: Look) -> str:
    """Returns why it may be at rest: a source reported it before and does not now, or gave no answer; else "".

    A gate that answers is enough: vLLM's own /is_paused asks the engine core, and a stuck one does not answer.
    """
    lost = history.lost
    is_told = look.gate is not None and lost == "pause"
    return f"it may be paused or asleep: the {lost} stopped reporting" if lost and not is_told else ""
