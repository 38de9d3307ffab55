"""The whole answer, the sentences about it, and what it rests on."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.simulate.settings import StepTime
from plimsoll.simulate.silicon import RELATIVE_BAND
from plimsoll.simulate.trace import make_trace
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.answer import Doubt, StretchedScores, Tuning, curve, fingerprint, flags_of, runner_up, tune, with_flags
from plimsoll.tune.goodput import Failed, Slo, Traffic
from plimsoll.tune.space import Candidate, Space
from plimsoll.tune.verdict import headline, is_tie, label, margin, measurement, ranges, reasons, runner_up_sentence
from tests.tune.servers import SMALL, run, server, traffic


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    """Chats that are too many for the default flags of an L4."""
    return tune(traffic(), server(), SMALL, run)


def test_better_flags_are_named_with_what_they_are_worth(tuning: Tuning) -> None:
    """The first sentence has the flags, the goodput and the comparison; each changed flag has its reason."""
    assert tuning.found is not None
    assert tuning.found.own is not None
    assert tuning.found.best.score.goodput > tuning.found.own.score.goodput
    said = headline(tuning)
    for name in tuning.found.best.option.candidate.differences(tuning.own):
        flag = "--" + name.replace("_", "-")
        assert flag in said
        assert any(sentence.startswith(flag) for sentence in reasons(tuning))
    assert "as promised" in said
    assert "your own flags" in said
    assert tuning.space.max_num_seqs == (8, 16, 32, 64, 256), "the command's own value is searched, too"


def test_what_one_flag_does_is_said_against_the_rest_as_chosen(tuning: Tuning) -> None:
    """In the words of the first sentence and against what; many times as many are no percentage."""
    assert tuning.found is not None
    best = tuning.found.best
    (name, *_) = best.option.candidate.differences(tuning.own)
    then = getattr(tuning.own, name)
    before = best.option._replace(candidate=best.option.candidate._replace(**{name: then}))

    def said(times: float) -> str:
        was = best._replace(option=before, score=best.score._replace(goodput=best.score.goodput / times if times else 0.0))
        assert tuning.found is not None
        found = tuning._replace(found=tuning.found._replace(tried=(best, was)))
        return reasons(found)[0]

    against = f"{then} and the rest as chosen"
    assert f": 25.0% more than with {against}" in said(1.25)
    assert f": 2.5 times as many as with {against}" in said(2.5)
    assert f": 43 times as many as with {against}" in said(43.12)
    assert f": 1,296 times as many as with {against}" in said(1296.1)
    assert f": with {against} no request is served as promised" in said(0)
    assert ": makes no difference by itself" in said(1.0)
    # Nobody ran it; and what else differs stands beside it.
    alone = tuning._replace(found=tuning.found._replace(tried=(best,)), refused=())
    assert reasons(alone)[0].endswith(f", not {then}: not compared.")
    worse = best.score._replace(
        preemptions=best.score.preemptions + 900, late_first=best.score.requests, late_further=best.score.requests
    )
    was = best._replace(option=before, score=worse)
    why = reasons(tuning._replace(found=tuning.found._replace(tried=(best, was))))[0]
    for part in ("wait too long for the first, not 100.0%", "get further tokens too slowly, not 100.0%", " preemptions, not "):
        assert part in why, part


def test_curves_runner_up_and_margin_go_with_the_chosen_one(tuning: Tuning) -> None:
    """In order of the value, none better than the chosen one by more than a tie; what is left of card and goodput."""
    assert tuning.found is not None
    chosen = tuning.found.best.option.candidate
    line = curve(tuning, "max_num_seqs")
    values = [one.option.candidate.max_num_seqs for one in line]
    assert values == sorted(values)
    assert chosen in [one.option.candidate for one in line]
    assert len(values) > 2
    assert {one.option.candidate.max_num_batched_tokens for one in line} == {chosen.max_num_batched_tokens}
    assert max(one.score.goodput for one in line) <= 1.006 * tuning.found.best.score.goodput
    second = runner_up(tuning)
    assert second is not None
    assert second.option.candidate[:2] != chosen[:2], "not a twin with other blocks"
    assert second.score.goodput <= 1.005 * tuning.found.best.score.goodput
    assert "GiB of the card stay free" in margin(tuning)
    assert tuning.at_low_end is not None
    assert tuning.at_low_end.goodput <= tuning.found.best.score.goodput * 1.01


def test_without_a_fit_it_is_a_rough_guide_and_says_what_to_measure(tuning: Tuning) -> None:
    """Three clocks give ranges in which the chosen setting lies. With a fit it is a recommendation, without doubt."""
    assert label(tuning) == "rough guide: not fitted"
    assert "PLIMSOLL_RECORD" in measurement(tuning)
    assert tuning.found is not None
    assert tuning.doubt is not None
    assert [clock.factor for clock in tuning.doubt.clocks] == [1.0, *RELATIVE_BAND]
    for name, (low, high) in tuning.doubt.ranges.items():
        assert low <= getattr(tuning.found.best.option.candidate, name) <= high
    assert tuning.doubt.clocks[1].best >= tuning.doubt.clocks[2].best, "slower steps cannot be better"
    fitted = tune(traffic(), server()._replace(step_time=StepTime(64_000_000, 222_000), fitted="fitted to a run"), SMALL, run)
    assert label(fitted) == "recommendation"
    assert (fitted.doubt, ranges(fitted)) == (None, [])
    assert measurement(fitted) == ""
    assert label(fitted._replace(server=fitted.server._replace(is_poor=True))) == "rough guide: poor fit"


def test_light_traffic_keeps_its_flags() -> None:
    """Where all is well, the own setting is right."""
    found = tune(traffic("ttft=20s", 0.05, 100), server(), SMALL, run)
    assert found.found is not None
    assert found.found.best.option.candidate == found.own
    assert headline(found).startswith("Your flags are right as they are")
    assert any("no setting could do more" in sentence for sentence in reasons(found))


def test_without_a_promise_none_is_spoken_of() -> None:
    """Neither where nothing can be served, as behind a queue of no places, nor where a setting is only quicker."""
    unpromised = traffic(requests=20)._replace(slo=Slo())
    found = tune(
        unpromised, server("--max-model-len", "8192", "--max-num-queued-reqs", "0"), Space((8,), (512,), (16,), (0.9,)), run
    )
    assert headline(found).startswith("No setting serves a single request: ")


def test_no_setting_that_is_safe_and_runs_is_said_with_its_reason() -> None:
    """A context that does not fit stops all of them; where safe ones cannot run, the replays' reason is what is said."""
    found = tune(traffic(), server("--max-model-len", "131072"), SMALL, run)
    assert found.found is None
    assert "startup.context-too-long" in headline(found)
    assert (reasons(found), margin(found)) == ([], "")
    own = server("--max-model-len", "8192", "--gpu-memory-utilization", "0.99")
    found = tune(
        traffic(), own, SMALL, lambda _, jobs: ((place, Failed("none can ever be scheduled")) for place in range(len(jobs)))
    )
    assert not found.own_option.is_safe
    assert found.found is None
    assert "none can ever be scheduled" in headline(found)


def test_a_set_cache_is_not_varied_by_utilisation() -> None:
    """A cache of a set size knows no utilisation, so such twins are not run; here it is no smaller than it has to be."""
    given = server("--max-model-len", "8192", "--kv-cache-memory-bytes", "2147483648")
    found = tune(traffic(requests=100), given, SMALL, run)
    assert found.space.gpu_memory_utilization == (0.92,)
    assert not any("holds this server back" in sentence for sentence in reasons(found))


def test_a_cache_that_was_set_too_small_is_named() -> None:
    """Full, while more of the card lies idle than it has: that is the trouble, and no other flag mends it."""
    given = server("--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456")
    small = Traffic(
        generate(parse_synthetic("synthetic:requests=200,rate=3,prompt=300,output=200,prompt_max=700,output_max=300"))
    )
    said = [one for one in reasons(tune(small, given, SMALL, run)) if "holds this server back" in one]
    assert len(said) == 1
    assert said[0].startswith("--kv-cache-memory-bytes")


def test_steps_larger_than_the_measured_ones_are_said_to_be_a_guess(tuning: Tuning) -> None:
    """More requests at once than the fit saw: said with both numbers; as many or nearly: nothing is said."""
    assert tuning.found is not None
    most = tuning.found.best.score.peak_running

    def told(learnt: int | None) -> list[str]:
        return [one for one in reasons(tuning._replace(server=tuning.server._replace(most_running=learnt))) if "learnt" in one]

    assert told(None) == told(most) == told(most - 1) == []
    (said,) = told(most // 2)
    assert f"at most {most // 2} requests at once, and this has {most}" in said


def test_only_flags_that_differ_are_said_and_old_values_go_however_they_were_written() -> None:
    """The others stay as they were; with a blank, with =, with underscores; other words are not touched."""
    own = Candidate(256, 2048, 16, 0.92)
    assert flags_of(own, own) == {}
    assert flags_of(Candidate(32, 2048, 16, 0.9), own) == {"--max-num-seqs": "32", "--gpu-memory-utilization": "0.9"}
    words = "vllm serve M --max-num-seqs 8 --port=80 --max_num_batched_tokens=512 --block-size=16".split()
    found = with_flags(words, {"--max-num-seqs": "32", "--max-num-batched-tokens": "1024"})
    assert found == "vllm serve M --port=80 --block-size=16 --max-num-seqs 32 --max-num-batched-tokens 1024".split()


def test_every_part_of_a_step_is_stretched() -> None:
    """Constants and the table alike."""
    times = StepTime(100, 20, 10, 40, np.array([100, 120]), 8, 4, 500).scaled(1.5)
    assert times[:4] == (150, 30, 15, 60)
    assert (times.pair_fs, times.prompt_ns, times.front_ns) == (12, 6, 500), "the way to the scheduler is no part of a step"
    assert times.by_tokens is not None
    assert times.by_tokens.tolist() == [150, 180]


def test_a_change_that_the_clock_cannot_tell_from_none_is_a_tie(tuning: Tuning) -> None:
    """The own flags are replayed at both ends of the band: better at one of them or as good at two is a tie."""
    doubt, found = tuning.doubt, tuning.found
    assert doubt is not None
    assert found is not None
    best = found.best

    def tied(*gains: float) -> bool:
        worse = [best.score._replace(goodput=best.score.goodput / (1 + gain)) for gain in gains]
        pairs = [((best.option.candidate, best.score), (tuning.own, own)) for own in worse]
        clocks = tuple(StretchedScores(1.0, pair) for pair in pairs)
        return is_tie(tuning._replace(doubt=Doubt(clocks, {}, steady=True)))

    assert tuning.own in [candidate for candidate, _ in doubt.clocks[1].scores], "or nothing could be said of it"
    assert [tied(0.2, 0.0, 0.3), tied(0.2, 0.0, 0.0), tied(0.2, 0.3, -0.1), tied(0.2, 0.2, 0.2)] == [False, True, True, False]
    said = runner_up_sentence(tuning)
    assert said.startswith("Runner-up: --max-num-seqs")
    assert " of 400, not " in said or "a tie" in said


def test_traffic_has_numbers() -> None:
    """Rates, lengths and what was seen before; all at once has no rate."""
    second = 10**9
    ids = [[1, 2], [1, 2], [1, 3]]
    trace = make_trace("three", [0, second, 2 * second], [10, 20, 60], [1, 2, 3], ids=ids, prefix_block=8)
    found = fingerprint(Traffic(trace, 2.0))
    assert (found.requests, found.span_s, found.rate) == (3, 1.0, 3.0)
    assert found.prompt_mean == 30
    assert found.prompt_p99 == 60
    assert found.shared == pytest.approx(0.5)
    found = fingerprint(Traffic(make_trace("at once", [0, 0], [8, 8], [1, 1])))
    assert (found.rate, found.busiest_minute_rate, found.shared) == (0.0, 0.0, 0.0)
