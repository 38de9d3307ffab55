"""Ready or not: only five things are reasons, and the gravest is named."""

from __future__ import annotations

import itertools

from plimsoll.inside.admission import LEAVING, REASONS, REFUSING, SERVING, Standing, judge

WELL = Standing(has_engine=True, is_dead=False, is_proven_wedged=False, asleep="", drain_phase=SERVING)


def test_a_server_that_is_well_is_ready() -> None:
    """Nothing to say."""
    assert judge(WELL) == ("ready", "")
    assert judge(WELL).is_ready


def test_each_reason_alone_is_named() -> None:
    """Starting, dead, wedged, asleep, draining in either phase."""
    assert judge(WELL._replace(has_engine=False)).reason == "starting"
    assert judge(WELL._replace(is_dead=True)).reason == "dead"
    assert judge(WELL._replace(is_proven_wedged=True)).reason == "wedged"
    assert judge(WELL._replace(asleep="paused: waits")) == ("asleep", "paused: waits")
    for phase in (LEAVING, REFUSING):
        assert judge(WELL._replace(drain_phase=phase)).reason == "draining"
        assert phase in judge(WELL._replace(drain_phase=phase)).detail


def test_the_gravest_is_named_and_ready_means_none_holds() -> None:
    """Over all combinations: the order of REASONS."""
    for engine, dead, wedged, asleep, phase, stopping in itertools.product(
        (True, False), (True, False), (True, False), ("", "paused"), (SERVING, LEAVING, REFUSING), (True, False)
    ):
        holds = dict(zip(REASONS, (not engine, dead, wedged, bool(asleep), stopping or phase != SERVING), strict=True))
        expected = next((reason for reason in REASONS if holds[reason]), "ready")
        found = judge(Standing(engine, dead, wedged, asleep, phase, is_stopping=stopping))
        assert found.reason == expected
        assert found.is_ready == (not any(holds.values()))


def test_load_is_no_input() -> None:
    """Nothing about a queue or shedding can make a server not ready: the judge is never told of it."""
    assert Standing._fields == ("has_engine", "is_dead", "is_proven_wedged", "asleep", "drain_phase", "is_stopping")
