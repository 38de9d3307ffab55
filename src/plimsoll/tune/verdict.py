"""The answer in sentences: the setting, the reasons, the gain, and how sure it is."""

from __future__ import annotations

import math

from plimsoll.simulate.summary import POOR_GUIDE, ROUGH_GUIDE
from plimsoll.tune.answer import Tuning, runner_up
from plimsoll.tune.goodput import Score
from plimsoll.tune.search import TIE, Trial
from plimsoll.tune.space import FLAGS, is_taken, value_text
from plimsoll.units import format_count, format_gib

RECOMMENDATION = "recommendation"
WORTH_A_WORD = 0.01
FULL = 0.99
NEARLY_ALL = 0.995
MANY_TIMES = 9.95
BEYOND = 1.25  # Factor on the requests at once that were measured: beyond it step times are guessed from smaller steps


def label(tuning: Tuning) -> str:
    """Returns whether the answer is a recommendation or a rough guide."""
    return ROUGH_GUIDE if tuning.server.fitted is None else POOR_GUIDE if tuning.server.is_poor else RECOMMENDATION


def headline(tuning: Tuning) -> str:
    """The finding in one sentence."""
    found = tuning.found
    if found is None and tuning.failures:
        return f"No setting can serve this traffic: none of the replays came to an end: {tuning.failures[0]}."
    if found is None:
        return f"No setting is safe: {tuning.own_option.why_not}{tuning.own_option.because}."
    best, own = found.best, found.own
    if serves_none(tuning):
        # Either a promise that this server cannot keep even with little traffic, or more traffic than it can serve.
        why = f"{tuning.seen.rate:.3g} come a second, and no setting does more than {_most_done(tuning):.3g}"
        if (slow := _too_slow(tuning)) is not None:
            most, took = slow.score.peak_running, f"{(slow.score.tpot_p50 or 0.0) * 1e3:.3g} ms"
            why = f"even with at most {format_count(most)} at once half of them wait {took} or more for each further token"
        promise = f" as promised ({tuning.traffic.slo})" if not tuning.traffic.slo.is_empty else ""
        return f"No setting serves a single request{promise}: {why}."
    much = f"{best.score.goodput:.3g} requests a second"
    if not tuning.traffic.slo.is_empty:
        much += f" as promised ({of_all(best.score.met, best.score)} of all)"
    if best.option.candidate == tuning.own and keeps_all(best.score) and not tuning.traffic.slo.is_empty:
        return f"Your flags are right as they are: {much}. No promise is broken."
    if best.option.candidate == tuning.own:
        return f"Your flags are right as they are: {much}, and nothing that was tried is better by more than {TIE:.1%}."
    words = " ".join(f"{FLAGS[name]} {value_text(getattr(best.option.candidate, name))}" for name in _changed(tuning))
    if own is None:
        return f"Set {words}: {much}. Your own flags are not safe: {tuning.own_option.why_not}."
    counts = f"{format_count(best.score.met)} of {format_count(best.score.requests)}, "
    counts += f"not {format_count(own.score.met)}" if best.score.met != own.score.met else "as many with either"
    return f"Set {words}: {much}, {_more(best.score.goodput, own.score.goodput)} your own flags ({counts})."


def is_tie(tuning: Tuning) -> bool:
    """True if the clock's band is wider than the chosen setting's gain over the command's own.

    That is so where the own setting does more at any of three places of the band, its middle or its ends, or as much at two.
    """
    found, doubt = tuning.found, tuning.doubt
    if found is None or doubt is None or found.own is None or found.best.option.candidate == tuning.own:
        return False
    pairs = [[dict(clock.scores).get(one) for one in (found.best.option.candidate, tuning.own)] for clock in doubt.clocks]
    gains = [best.goodput / max(own.goodput, 1e-9) - 1 for best, own in pairs if best is not None and own is not None]
    return min(gains, default=0.0) < -TIE or sum(gain > WORTH_A_WORD for gain in gains) < 2


def runner_up_sentence(tuning: Tuning) -> str:
    """The best other setting, what it loses and why; empty where there is none."""
    second = runner_up(tuning)
    if second is None or tuning.found is None:
        return ""
    best, other, candidate = tuning.found.best.score, second.score, second.option.candidate
    setting = " ".join(f"{FLAGS[name]} {value_text(getattr(candidate, name))}" for name in candidate._fields)
    lost = 1 - other.goodput / best.goodput if best.goodput else 0.0
    counts = f" ({format_count(other.met)} of {format_count(other.requests)}, not {format_count(best.met)})"
    counts = counts if other.met != best.met else ""
    loses = f"loses {lost:.1%}{counts}" if lost >= TIE else "a tie" if best.goodput else "no better"
    if lost < -TIE:
        loses = f"{-lost:.1%} more a second, {'but no promise hangs on it' if keeps_all(best) else 'which is a tie'}{counts}"
    _, *why = _differences(tuning.found.best, second, tuning, "")
    return f"Runner-up: {setting}, {loses}" + (f"; with the chosen one {', '.join(why)}." if why else ".")


def serves_none(tuning: Tuning) -> bool:
    """True if even the best trial breaks every promise."""
    return tuning.found is not None and not tuning.found.best.score.met


def _most_done(tuning: Tuning) -> float:
    return max(one.score.requests_per_second for one in tuning.result.tried)


def _too_slow(tuning: Tuning) -> Trial | None:
    """The trial with the quickest tokens, where even its median is later than promised; else None."""
    promised, tried = tuning.traffic.slo.tpot, [one for one in tuning.result.tried if one.score.tpot_p50 is not None]
    quickest = min(tried, key=lambda one: one.score.tpot_p50 or 0.0, default=None)
    return quickest if promised is not None and quickest is not None and (quickest.score.tpot_p50 or 0.0) > promised else None


def keeps_all(score: Score) -> bool:
    """True if every request that is not refused was served as promised."""
    return score.met == score.requests - score.rejected


def _more(now: float, before: float) -> str:
    if before <= 0:
        return "where none were as promised with"
    change = now / before - 1
    if abs(change) < TIE:
        return "as many as with"
    if change >= 1:
        return f"{now / before:,.{1 if now / before < MANY_TIMES else 0}f} times as many as with"
    return f"{abs(change):.1%} {'more' if change > 0 else 'fewer'} than with"


def reasons(tuning: Tuning) -> list[str]:
    """The reasons for the setting: each changed flag, with the result of the run with that flag alone as it was."""
    if tuning.found is None:
        return []
    if serves_none(tuning):  # the server alone is too slow, or it is one of several that share the traffic
        faster = "a faster card, several cards for one server (--tensor-parallel-size), a smaller or quantised model"
        other = f"{faster}, or a promise it can keep"
        if _too_slow(tuning) is not None:
            return [f"More servers like it would not help. What would: {other}."]
        done = _most_done(tuning)
        servers = max(2, math.ceil(tuning.seen.rate / done)) if done > 0 else 2
        share = f"--speedup {tuning.traffic.speedup / servers:.2g} tunes for the share of one of"
        return [f"What to try: {share} {format_count(servers)} such servers; or {other}."]
    best = tuning.found.best
    said = []
    for name in _changed(tuning):
        wanted = best.option.candidate._replace(**{name: getattr(tuning.own, name)})
        before = next((one for one in tuning.found.tried if one.option.candidate == wanted), None)
        now, then = value_text(getattr(best.option.candidate, name)), value_text(getattr(tuning.own, name))
        refused = next((one for one in tuning.refused if one.candidate == wanted), None)
        if before is not None:
            why = ", ".join(_differences(best, before, tuning, f"{then} and the rest as chosen"))
        elif not is_taken(wanted):
            why = f"vLLM does not take {then} with these others: a step must have room for a token of each request"
        else:
            why = "not compared" if refused is None else f"with {then} beside the others plan warns of {refused.why_not}"
        said.append(f"{FLAGS[name]} {now}, not {then}: {why}.")
    return [*said, *_limits(tuning)]


def _differences(best: Trial, before: Trial, tuning: Tuning, against: str) -> list[str]:
    now, then = best.score, before.score
    parts, slo = [], tuning.traffic.slo
    if not then.goodput:
        parts.append(f"with {against} no request is served{'' if slo.is_empty else ' as promised'}")
    elif abs(now.goodput / then.goodput - 1) >= TIE:
        counts = f" ({format_count(now.met)} {slo.word}, not {format_count(then.met)})" if now.met != then.met else ""
        parts.append(f"{_more(now.goodput, then.goodput)} {against}{counts}")
    else:
        parts.append("makes no difference by itself")
    if slo.tpot is not None and abs(now.late_further - then.late_further) >= WORTH_A_WORD * now.requests:
        parts.append(f"{of_all(now.late_further, now)} get further tokens too slowly, not {of_all(then.late_further, then)}")
    if slo.ttft is not None and abs(now.late_first - then.late_first) >= WORTH_A_WORD * now.requests:
        parts.append(f"{of_all(now.late_first, now)} wait too long for the first, not {of_all(then.late_first, then)}")
    if now.preemptions != then.preemptions and max(now.preemptions, then.preemptions) >= WORTH_A_WORD * now.requests:
        parts.append(f"{format_count(now.preemptions)} preemptions, not {format_count(then.preemptions)}")
    room = best.option.kv_tokens - before.option.kv_tokens
    if abs(room) >= WORTH_A_WORD * before.option.kv_tokens:
        parts.append(f"room for {format_count(abs(room))} tokens {'more' if room > 0 else 'fewer'} in the cache")
    free = best.option.ledger.slack.value - before.option.ledger.slack.value
    if abs(free) >= WORTH_A_WORD * best.option.ledger.card.total_bytes:
        parts.append(f"{format_gib(abs(free))} {'more' if free > 0 else 'less'} of the card stay free")
    return parts


def of_all(count: int, score: Score) -> str:
    """A count as a share of all requests."""
    return f"{count / max(1, score.requests):.1%}"


def _limits(tuning: Tuning) -> list[str]:
    score, most = tuning.result.best.score, tuning.result.most
    said = []
    if keeps_all(score) and not tuning.traffic.slo.is_empty:
        said.append("All that can be served are served as promised: no setting could do more.")
    elif score.goodput >= NEARLY_ALL * most:
        said.append(f"No setting could do more than {most:.3g} a second.")
    elif score.met < 0.9 * (score.requests - score.rejected) and not tuning.traffic.slo.is_empty:
        said.append("Even so, many are late: more comes than this server can serve as promised, whatever these four flags say.")
    ledger = tuning.result.best.option.ledger
    if ledger.settings.has_fixed_cache and score.kv_peak >= FULL and ledger.slack.low >= ledger.kv.value:
        is_size = ledger.settings.kv_cache_memory_bytes is not None
        flag = "--kv-cache-memory-bytes" if is_size else "--num-gpu-blocks-override"
        full = f"its {format_gib(ledger.kv.value)} were full while {format_gib(ledger.slack.value)} lay idle"
        said.append(f"{flag} is what holds this server back: {full}. Leave it out and tune again.")
    learnt = tuning.server.most_running
    if learnt is not None and score.peak_running > BEYOND * learnt:  # a guess about steps that were not timed
        known = f"Step times were learnt with at most {format_count(learnt)} requests at once, and this has"
        said.append(f"{known} {format_count(score.peak_running)}: record the changed server and tune again.")
    if score.rejected:
        longest = ledger.kv_plan.max_model_len
        is_longer = "request is longer" if score.rejected == 1 else "requests are longer"
        refused = "is refused" if score.rejected == 1 else "are refused"
        said.append(f"{format_count(score.rejected)} {is_longer} than {format_count(longest)} tokens and {refused}.")
    if score.refused:
        said.append(
            f"{format_count(score.refused)} of {format_count(score.requests)} came when the queue was full and are refused."
        )
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        values, value = getattr(tuning.space, name), getattr(tuning.result.best.option.candidate, name)
        if len(values) > 1 and value != getattr(tuning.own, name) and value in (values[0], values[-1]):
            end = "lowest" if value == values[0] else "highest"
            said.append(f"{FLAGS[name]} {value} is the {end} value that was looked at.")
    return said


def margin(tuning: Tuning) -> str:
    """The room left, and the effect of a smaller cache than planned."""
    if tuning.found is None:
        return ""
    ledger = tuning.found.best.option.ledger
    said = f"{format_gib(ledger.slack.value)} of the card stay free beside vLLM ({format_gib(ledger.slack.low)} at least)"
    if tuning.at_low_end is not None:
        share = tuning.at_low_end.goodput / tuning.found.best.score.goodput if tuning.found.best.score.goodput else 0.0
        least = format_gib(ledger.kv.low)
        what = "requests a second" if tuning.traffic.slo.is_empty else "requests a second as promised"
        said += f"; if the cache turns out as small as plan thinks possible ({least}), {share:.1%} of the {what} are left"
    return said + "."


def ranges(tuning: Tuning) -> list[str]:
    """The range of values in which the answer lies; empty with a fit."""
    if tuning.doubt is None or tuning.found is None:
        return []
    found = tuning.doubt.ranges.items()
    return [f"{FLAGS[name]} between {low:g} and {high:g}" for name, (low, high) in found if low != high]


def measurement(tuning: Tuning) -> str:
    """The measurement that would turn a rough guide into a recommendation."""
    if tuning.doubt is None or tuning.found is None:
        return ""
    tokens = tuning.found.best.option.candidate.max_num_batched_tokens
    how = (
        "record some minutes of the real server under load with the flags it has now (PLIMSOLL_RECORD=FOLDER, docs/inside.md) "
        "and give that to --fit"
    )
    if tuning.doubt.steady:
        low, high = (f"{abs(clock.factor - 1):.0%}" for clock in tuning.doubt.clocks[1:])
        return f"With steps {low} faster or {high} slower it stays as good as any. To be sure, {how}."
    return f"What would settle it: how long a step of up to {format_count(tokens)} tokens takes on this card; {how}."


def _changed(tuning: Tuning) -> list[str]:
    return tuning.result.best.option.candidate.differences(tuning.own)
