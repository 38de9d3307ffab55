"""A tuning as a screen, JSON and commands: the same answer everywhere, and safe whatever a trace or a model is called."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from plimsoll.render.tune import BAR, TuneReport, as_json, as_text, commands, sentences
from plimsoll.tune.answer import Tuning, tune
from plimsoll.tune.goodput import Slo
from tests.tune.servers import SMALL, ready, run, server, traffic

HOSTILE = "\"><script>alert('x')</script>\x1b[31m"


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    """Chats that are too many for the default flags of an L4."""
    return tune(traffic(), server(), SMALL, run)


@pytest.fixture
def shown(tuning: Tuning) -> TuneReport:
    """The tuning, with the plan of the user's own command in the place of each."""
    own = ready().plan()
    return TuneReport(tuning, own, own, own, ("a note",))


def test_the_bars_are_drawn_to_the_best_and_the_chosen_one_is_marked(shown: TuneReport) -> None:
    """The longest bar of each curve is as long as the scale; one line of each has the mark."""
    curves = re.split(r"--max-num-\S+: requests a second as promised\n", str(as_text(shown)))[1:]
    assert len(curves) == 2
    for block in curves:
        rows = [line for line in block.split("\n\n")[0].splitlines() if "#" in line]
        assert max(line.count("#") for line in rows) == BAR
        assert sum(line.endswith("<") for line in rows) == 1


def test_every_sentence_is_on_the_screen_and_in_the_json(shown: TuneReport) -> None:
    """Nothing is cut, and the same command under three names is written once."""
    screen = " ".join(str(as_text(shown)).split())
    body = json.loads(as_json(shown))
    assert body["reading"] == sentences(shown)
    assert body["notes"] == ["a note"]
    for sentence in sentences(shown):
        assert " ".join(sentence.split()) in screen
    assert len(commands(shown)) == 1
    assert commands(shown)[0].startswith("vllm serve ")


def test_a_name_that_is_an_attack_stays_text(tuning: Tuning) -> None:
    """No escape code on the screen nor in the JSON."""
    trace = tuning.traffic.trace._replace(name=HOSTILE)
    own = replace(ready().plan(), model=HOSTILE)
    shown = TuneReport(tuning._replace(traffic=tuning.traffic._replace(trace=trace)), own, None, None, (HOSTILE,))
    assert "\x1b" not in str(as_text(shown)) + as_json(shown)


def test_without_a_safe_setting_the_advice_is_the_answer(tuning: Tuning) -> None:
    """No command, no curves, and every flag that plan would change."""
    nothing = tuning._replace(found=None)
    own = ready("--max-model-len", "131072").plan()
    shown = TuneReport(nothing, own, None, None)
    text = str(as_text(shown))
    assert "requests a second as promised\n" not in text
    assert json.loads(as_json(shown))["chosen"] is None
    assert own.advice
    for advice in own.advice:
        assert f"{advice.flag} {advice.value}" in text


def test_without_a_promise_none_is_mentioned(tuning: Tuning) -> None:
    """The first line has no `promised` where nothing was."""
    bare = tuning._replace(traffic=tuning.traffic._replace(slo=Slo()))
    own = ready().plan()
    assert ", promised" in str(as_text(TuneReport(tuning, own, own, None))).splitlines()[0]
    assert ", promised" not in str(as_text(TuneReport(bare, own, own, None))).splitlines()[0]
