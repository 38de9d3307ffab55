"""Runs on an H200 as they were kept: their replay, and pairs where one predicts the other, or cannot."""

from __future__ import annotations

import json

import pytest

from benchmarks import tune_h200 as h200
from lab.gpu.provoke_failures import HERE
from lab.service import score, tuned
from plimsoll.simulate.replay import replay


@pytest.mark.parametrize("name", ["kernel", "blocks", "shed", "burst", "seats", "seats with graphs", "segments", "starts"])
def test_the_page_holds_what_the_runs_left(name: str) -> None:
    """Each table of docs/evidence.md that is read off the kept runs is what the command beside it prints."""
    table = "\n".join(dict(score.PARTS)[name]())
    assert f"<!-- {name} -->\n\n{table}\n\n<!-- end of {name} -->" in score.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("fit_on", ["overload-none-1", "unlimited-2", "article-1", "graphs-seats-24-2"])
def test_a_run_on_the_gpu_is_foretold_by_another_and_the_page_says_how_well(fit_on: str) -> None:
    """Duration, first token and further tokens within 7 % or twice the spread of two equal runs; preemptions within 10 %."""
    name = dict(score.PAIRS)[fit_on]
    found = score.foretold(fit_on, name)
    assert all(
        abs(error) <= max(score.ALLOWED, 2 * noise) for error, noise in zip(found[:3], score.noise(fit_on, name), strict=True)
    )
    assert abs(found.preemptions - found.preemptions_measured) <= 0.1 * found.preemptions_measured
    assert f"| {' | '.join(score.foretold_row(fit_on, name))} |" in score.PAGE.read_text(encoding="utf-8")


def test_what_tune_named_is_what_was_run_and_it_came_as_foretold() -> None:
    """tune read the burst under the article's flags; the server `tuned` has the flags it named, and kept its promise."""
    servers = json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))["servers"]
    said = tuned.answer("article-1")
    flags = servers["tuned"]["flags"]
    for name, value in said["chosen"].items():
        assert flags[flags.index(f"--{name.replace('_', '-')}") + 1] == str(value)
    for setting, foretold in (("article", said["own"]["score"]), ("tuned", said["score"])):
        for number in (1, 2):
            found = score.all_loads()[f"{setting}-{number}"].found
            assert found["good"] == pytest.approx(foretold["met"], abs=1)
            assert found["seconds"] == pytest.approx(foretold["seconds"], rel=score.ALLOWED)


@pytest.mark.parametrize(("fitted", "predicted"), [("tight", "storm"), ("storm", "tight")])
def test_fitted_to_one_run_the_other_is_predicted(fitted: str, predicted: str) -> None:
    """Within ten per cent in requests a second, in both directions: another load on the same server."""
    assert abs(h200.crossed(fitted, predicted)) < 0.10


@pytest.mark.parametrize("fitted", ["unlimited-2", "seats-24-2", "graphs-unlimited-1", "graphs-seats-24-1"])
def test_with_and_without_a_limit_each_is_predicted_by_the_other(fitted: str) -> None:
    """Two settings of one server in one hour: within ten per cent, and unlimited is the better one, as it was measured."""
    off, gain = h200.paired(fitted)
    assert abs(off) < 0.10
    assert gain > 0
    kind = "graphs-" if fitted.startswith("graphs-") else ""
    assert score.seen(f"{kind}unlimited-2").duration_s < score.seen(f"{kind}seats-24-2").duration_s


def test_the_storm_itself_is_replayed_and_unlimited_and_24_were_not_equally_fast_servers() -> None:
    """The h200.traffic is the one that was sent, 232 preemptions and 38 at once come again; and the miss, with its cause."""
    run = h200.seen()
    assert h200.traffic(h200.UNLIMITED).prompt.sum() == run.prompt_tokens[-1]
    assert 0 <= h200.traffic(h200.UNLIMITED).output.sum() - run.output_tokens[-1] < 10
    found = replay(h200.traffic(h200.UNLIMITED), h200.SERVER, h200.fitted_to_unlimited()).totals
    assert found.preemptions == pytest.approx(232, rel=0.1)
    assert found.peak_running == pytest.approx(38, abs=2)
    # Steps of the unlimited run took over 20 ms with any number of requests, those of the other 16 ms all told: a fit to one
    # is off by a fifth on the other, and no flag explains a step of one request.
    predicted = h200.LIMITED / h200.seconds(h200.LIMITED, h200.SEATS, h200.fitted_to_unlimited())
    assert predicted / (h200.LIMITED / h200.LIMITED_S) - 1 == pytest.approx(-0.22, abs=0.03)
    assert min(h200.step_ms(1, 6), h200.step_ms(6, 20), h200.step_ms(26, 40)) > 20
    steps = replay(h200.traffic(h200.LIMITED), h200.SERVER._replace(max_num_seqs=h200.SEATS), h200.start()).totals.steps
    assert 1e3 * h200.LIMITED_S / steps < 17
