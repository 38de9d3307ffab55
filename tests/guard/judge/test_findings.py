"""From conditions to findings, each under its own code; contained failures are told once a run, never acted on alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.contained import LastFailure, Survival, read_survival
from plimsoll.findings import Code, Evidence, Severity
from plimsoll.guard.judge.findings import PlannedTokens, as_planned, code_of, finding, findings, severity_of
from plimsoll.guard.judge.judge import QUESTIONS, Judge
from plimsoll.guard.judge.look import Canary, Look, Reach
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition, Status
from plimsoll.vllm.flags import flags_of
from tests.each import cases, each, sure
from tests.guard.acting import acting
from tests.guard.test_questions import GATE, busy, looks, says

CODES = {kind: Code(code) for kind, code in cases("guard", "codes of conditions")}
LOOK = Look(
    10.0, 1e9, Reach.ANSWERS,
    figures={"running": 40.0, "waiting": 60.0, "kv_cache_usage": 0.99, "success": 100.0, "prompt_tokens": 80_000.0,
             "generation_tokens": 20_000.0},
    config={"num_gpu_blocks": "1000", "block_size": "16", "gpu_memory_utilization": "0.9", "cache_dtype": "auto"},
)  # fmt: skip


def condition(kind: str, status: Status = Status.TRUE) -> Condition:
    return Condition(kind, status, "Reason", "it is so", 0.0, (Evidence("page", "a line"),))


def test_every_question_has_a_code_that_is_told_once_by_its_worst_condition() -> None:
    """None has two, the worst comes first; a full cache is advised with its own numbers, 16,000 tokens at 1,000 a request."""
    assert {kind for kind, _ in QUESTIONS} <= set(CODES)
    assert {kind: code_of(kind) for kind in CODES} == CODES
    found = findings([condition("prefix"), condition("growth"), condition("exhausted"), condition("storm")], LOOK)
    assert [one.code for one in found] == [Code.GPU_GROWTH, Code.KV_PREEMPTION_STORM, Code.PREFIX_CACHE_LOW_HIT_RATE]
    assert found[0].severity is Severity.CRITICAL
    (full,) = findings([condition("storm")], LOOK)
    assert ("--max-num-seqs", "16") in [(remedy.flag, remedy.value) for remedy in full.remedy]


@each("kind", CODES)
@each("look", [None, LOOK])
def test_a_condition_that_holds_becomes_a_finding(kind: str, look: Look | None) -> None:
    """With its own reason and evidence, what to do and what is no use; nothing comes of what is false or not known."""
    for status in (Status.FALSE, Status.UNKNOWN):
        assert (finding(condition(kind, status), look), findings([condition(kind, status)], look)) == (None, ())
    found = sure(finding(condition(kind), look))
    assert (found.code, found.severity) == (CODES[kind], severity_of(kind))
    assert (found.because, found.evidence) == ("it is so", (Evidence("page", "a line"),))
    assert (bool(found.remedy), bool(found.not_a_remedy)) == (True, True)
    assert {remedy.flag for remedy in found.remedy} <= {None, *flags_of("0.32.0")}


@each(("config", "status"), cases("guard", "starts against a plan"))
def test_a_start_is_held_against_its_plan(config: dict[str, str], status: str) -> None:
    """Outside the plan's own band it differs; without figures it is not known; tokens are compared, not blocks."""
    assert as_planned(PlannedTokens(16_000.0, 15_500.0, 16_500.0), LOOK._replace(config=config)).status == status
    assert as_planned(PlannedTokens(1.0, 1.0, 1.0), None).status is Status.UNKNOWN


ARMED = Survival(armed=True, contained=0.0, aborted=0.0, limping=False, storm=False, tokens_now=8192.0, tokens_start=8192.0)


def failed(count: float, age_s: float) -> Survival:
    """So many contained, the last so long ago, in a forward pass."""
    last = LastFailure(age_s, "forward", 8192.0, 48.0, 2.0 * 2**30, 1.0 * 2**30)
    return ARMED._replace(contained=count, last=last, tokens_now=1024.0, recomputed_tokens=190_000.0, stalled_s=1.7)


def surviving(seconds: int, state: Any, **others: Any) -> list[Look]:
    """Looks at an engine whose gate tells this of containment at each moment."""
    every = looks(seconds, busy, **others)
    return [look._replace(gate=GATE._replace(survival=state(look.at_s), last_step_age_s=0.1)) for look in every]


def judged(every: list[Look]) -> Judge:
    judge = Judge("engine", Policy())
    for look in every:
        judge.see(look)
    return judge


def begun(kind: str, every: list[Look]) -> list[float]:
    """When a condition began to hold, each time."""
    judge = Judge("engine", Policy())
    changes = [(look.at_s, change) for look in every for change in judge.see(look)]
    return [at_s for at_s, change in changes if change.kind == kind and change.is_true]


def test_a_run_of_failures_is_told_once_with_its_shape_its_cost_and_the_flag() -> None:
    """Twelve within a minute are one event, one an hour later another; of an old count a young failure is told."""

    def state(at: float) -> Survival:
        count = min(12.0, max(0.0, (at - 300) // 5)) + (at >= 4_000)
        return failed(count, 0.0 if at < 360 else at - (4_000 if at >= 4_000 else 360)) if count else ARMED

    assert begun("contained", surviving(6_000, state)) == [305.0, 4_000.0]
    assert [(at, status) for at, status, _ in says("contained", surviving(6_000, state))] == [
        (0, "false"), (305.0, "true"), (1_265.0, "false"), (4_000.0, "true"), (4_905.0, "false"),
    ]  # fmt: skip
    assert says("contained", surviving(10, lambda at: failed(3.0, 60.0 + at)))[0][1] == "true"
    assert says("contained", surviving(10, lambda at: failed(3.0, 3_600.0 + at)))[0][1] == "false"
    every = surviving(400, lambda at: failed(3.0, at - 300) if at >= 300 else ARMED)
    judge = judged(every)
    (found,) = [one for one in findings(judge.conditions, every[-1]) if one.code is Code.RUNTIME_CONTAINED]
    assert found.severity is Severity.WARNING
    shape = "8,192 tokens in 48 requests, at forward"
    for words in ("3 steps", shape, "asked for 2.0 GiB, 1.0 GiB free", "190,000 tokens", "1.7 s"):
        assert words in found.because
    assert (found.remedy[0].flag, found.remedy[0].value) == ("--max-num-batched-tokens", "1024")
    assert not acting(judge), "a contained failure alone leads to nothing"


@each(("site", "kind", "flag"), cases("guard", "flags of a failed site"))
def test_advice_names_the_flag_of_the_site(site: str, kind: str, flag: str) -> None:
    """By the newest failure's site and the shape of its request."""
    (look,) = surviving(5, lambda _: failed(1.0, 1.0)._replace(last=LastFailure(1.0, site, kind=kind)))
    (found,) = findings(judged([look]).conditions, look)
    assert next(one.flag for one in found.remedy if one.flag) == flag


@each(
    ("survival", "reason"),
    [(None, "TooOld"), (Survival(), "NoCount"), (ARMED._replace(armed=None), "NotArmed"),
     (ARMED._replace(armed=False, why="a KV connector is set"), "NotArmed"), (ARMED._replace(contained=None), "NoCount")],
)  # fmt: skip
def test_what_nobody_tells_is_unknown(survival: Survival | None, reason: str) -> None:
    """An older plimsoll, containment that is off or not armed, no count: neither yes nor no."""
    assert says("contained", surviving(60, lambda _: survival))[-1][1:] == ("unknown", reason)
    assert says("contained", looks(60, busy))[-1][1:] == ("unknown", "NoGate")


@each("name", ["storm", "limping"])
def test_a_storm_and_a_limp_hold_after_minutes(name: str) -> None:
    """Said at every look for three minutes, they call for a restart; for a moment they do not."""
    assert begun("limping", surviving(900, lambda at: failed(30.0, 1.0)._replace(**{name: at >= 300}))) == [480.0]
    assert begun("limping", surviving(900, lambda at: failed(30.0, 1.0)._replace(**{name: 300 <= at < 420}))) == []
    assert GRADES["limping"] is Grade.RESTART
    assert "contained" not in GRADES


@given(
    said=st.dictionaries(st.sampled_from(["storm", "limping"]), st.sampled_from([1, "true", [True], {"now": True}, None, 2.5]))
)
def test_wrong_types_never_lead_to_a_restart(said: dict[str, object]) -> None:
    """Whatever stands in the place of yes or no is unknown."""
    state = read_survival({"armed": True, "contained": 99, "aborted": 0, **said})
    judge = judged(surviving(600, lambda _: state))
    assert not acting(judge)
    assert next(one for one in judge.conditions if one.kind == "limping").reason == "NotTold"


def stuck(state: Any, *, is_proved: bool) -> list[Look]:
    """An engine with work that makes no step from 100 s on and answers no test request, whose gate tells this."""
    every = looks(600, lambda at: {**busy(at), "steps": 10.0 * min(at, 100.0)})
    return [
        look._replace(
            gate=GATE._replace(survival=state(look.at_s), last_step_age_s=max(0.0, look.at_s - 100.0), is_wedged=is_proved),
            canary=Canary(look.at_s // 30 * 30.0, is_answered=look.at_s < 100),
        )
        for look in every
    ]  # fmt: skip


@each("is_proved", [False, True])
def test_recomputing_is_never_called_stuck(is_proved: bool) -> None:
    """While steps are contained the loop lives: neither wedged nor hung nor stalled, however long no step ends."""
    recomputing = stuck(lambda at: failed(1.0 + max(0.0, at - 100) // 60, (at - 100) % 60), is_proved=is_proved)
    for kind in ("wedged", "hung", "stalled"):
        assert "true" not in [status for _, status, _ in says(kind, recomputing)]
    silent = stuck(lambda at: failed(1.0, at + 1.0) if at < 100 else failed(1.0, at - 99.0), is_proved=is_proved)
    first = next(one for one in says("wedged", silent) if one[1] == "true")
    assert 220 <= first[0] <= 240, "two minutes after the last contained failure it is stuck like any other"
    assert "true" in [status for _, status, _ in says("wedged", stuck(lambda _: None, is_proved=is_proved))]


@given(lost=st.sets(st.integers(0, 119)))
def test_losing_the_gate_does_not_make_a_recomputing_engine_stuck(lost: set[int]) -> None:
    """Whichever answers of the gate are lost, nothing is done about it."""
    every = stuck(lambda at: failed(1.0 + max(0.0, at - 100) // 60, (at - 100) % 60), is_proved=False)
    judge = Judge("engine", Policy())
    for place, look in enumerate(every):
        judge.see(look._replace(gate=None) if place in lost else look)
        assert not acting(judge)
