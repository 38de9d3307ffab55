"""What the comparison measures, and with what: the same traffic for everybody, guard's own defaults, and honest sums."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lab.article import compare
from lab.article.fleet import WATCHERS, WatchedFleet
from lab.article.incidents import INCIDENTS, LEAD_S, NAMES, Incident, documents, schedule
from lab.article.measure import (
    Seen,
    Word,
    fewest_in_service,
    first_s,
    out_of_service_s,
    peaks,
    percentile,
    restarts,
    whole_again_s,
)
from plimsoll.guard.config import read_guard_config
from plimsoll.guard.judge.policy import THRESHOLDS, read_policy
from plimsoll.standin.request import encode

BY_NAME = {one.name: one for one in INCIDENTS}
ALL, WITHOUT_C = {"a": True, "b": True, "c": True}, {"a": True, "b": True, "c": False}
FIRST = {"a": 1, "b": 2, "c": 3}


def seen(at_s: float, takes_work: dict[str, bool] | None = None, c: int = 3, under_way: int = 3) -> Seen:
    """The fleet at a moment, well unless said otherwise."""
    return Seen(at_s, ALL if takes_work is None else takes_work, {**FIRST, "c": c}, under_way)


@pytest.mark.parametrize("incident", INCIDENTS, ids=NAMES)
def test_the_traffic_is_the_same_for_the_same_seed(incident: Incident) -> None:
    """Every request is drawn before the scene begins, so no watcher can change what comes."""
    first = schedule(incident, 1)
    assert first == schedule(incident, 1)
    assert [one.at_s for one in first] == sorted(one.at_s for one in first)
    assert all(-LEAD_S <= one.at_s < incident.lasts_s for one in first)
    assert (first == schedule(incident, 2)) is (not first)
    assert documents(incident, 1) == documents(incident, 1)


def test_prompts_are_as_long_as_they_are_said_to_be() -> None:
    """One word is one token to a stand-in; in a quiet night nobody asks anything."""
    arrival = schedule(BY_NAME["burst"], 1)[-1]
    assert len(encode(arrival.text)) == arrival.prompt
    texts = documents(BY_NAME["full"], 1)
    assert {len(encode(text)) for text in texts} == {BY_NAME["full"].document}
    assert len(set(texts)) == len(texts) == 9
    assert schedule(BY_NAME["idle"], 1) == []


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_guard_has_its_own_defaults_but_for_the_scale(tmp_path: Path, scale: float) -> None:
    """With scale 1 every number is what guard has without a word; with another, that divided by it or the least it takes."""
    fleet = WatchedFleet(tmp_path, "guard", scale, use_haproxy=False)
    path = tmp_path / "plimsoll.toml"
    path.write_text(fleet.config(), encoding="utf-8")
    found = read_guard_config(str(path))
    assert [engine.name for engine in found.engines] == ["a", "b", "c"]
    policy = read_policy(tomllib.loads(fleet.config())["policy"])
    assert policy.every_s == max(1.0, 5.0 / scale)
    for knob in THRESHOLDS:
        expected = max(knob.low, knob.default / scale) if knob.unit == "s" else knob.default
        assert policy.number(knob.kind, knob.name) == pytest.approx(expected), knob


def test_the_engines_are_the_same_whoever_watches(tmp_path: Path) -> None:
    """One command, and the balancer asks /health: nothing that the article's reader would not have."""
    commands = set()
    for watcher in WATCHERS:
        folder = tmp_path / watcher
        folder.mkdir()
        fleet = WatchedFleet(folder, watcher, 5.0, use_haproxy=False)
        words = fleet.words("a")
        commands.add(tuple(word for word in words if word != str(fleet.ports["a"])))
        assert fleet.checks.path == "/health"
        assert "--shutdown-timeout" not in words
    assert len(commands) == 1


def test_time_out_of_service_and_wholeness_are_what_the_balancer_and_the_processes_say() -> None:
    """From the incident on, for good; one that hangs is out until its process is another."""
    rows = [seen(-5, WITHOUT_C), seen(-1), seen(4), seen(6, WITHOUT_C), seen(8, WITHOUT_C), seen(10, {}), seen(12)]
    assert out_of_service_s(BY_NAME["burst"], rows, FIRST) == {"a": 0.0, "b": 0.0, "c": 4.0}
    assert fewest_in_service(BY_NAME["burst"], rows, FIRST) == 2
    rows = [seen(-1), seen(2), seen(4), seen(6, c=9), seen(8, c=9)]
    assert out_of_service_s(BY_NAME["hang"], rows, FIRST) == {"a": 0.0, "b": 0.0, "c": 4.0}
    assert whole_again_s(BY_NAME["hang"], rows, FIRST) == 6
    assert out_of_service_s(BY_NAME["burst"], rows, FIRST)["c"] == 0.0
    burst = BY_NAME["burst"]
    many = burst.usual + 1
    assert whole_again_s(burst, [seen(1), seen(2)], FIRST) == 0.0
    assert whole_again_s(burst, [seen(1, under_way=many), seen(2), seen(3, WITHOUT_C), seen(4)], FIRST) == 4
    assert whole_again_s(burst, [seen(1), seen(2, under_way=many)], FIRST) is None


def test_what_was_not_measured_is_unknown() -> None:
    """Peaks of nothing are never 0; what was said before the incident does not count; a restart is another process."""
    assert restarts([seen(1), seen(2, c=7), seen(3, c=7), seen(4, c=8)], FIRST) == {"a": 0, "b": 0, "c": 2}
    words = [Word(-3, "a", "notice", "x"), Word(9, "a", "act", "restart"), Word(5, "b", "notice", "y")]
    assert first_s(words, "notice", "act") == 5
    assert first_s(words, "act") == 9
    assert first_s(words[:1], "notice") is None
    assert percentile([], 0.99) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert peaks([seen(1)])["kv"] is None
    row = Seen(1, ALL, FIRST, 3, {"a": (0.97, 3, 9, 1), "b": (0.5, 4, 0, 0)})
    assert peaks([row]) == {"kv": 0.97, "running": 4, "waiting": 9, "preemptions": 1, "looks_with_a_full_cache": 1.0}


def test_a_kept_run_reads_back_as_it_was(tmp_path: Path) -> None:
    """One line a scene, in the order of the table, never mixed with one of another scale."""
    path = tmp_path / "run.json"
    path.write_text('{"schema": "plimsoll.lab.article/1", "scale": 5.0, "seed": 1876, "scenes": []}', encoding="utf-8")
    with pytest.raises(SystemExit, match="scale 5"):
        compare.main(["--into", str(path), "--scale", "7"])
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="no run"):
        compare.main(["--from", str(path)])
    scenes = [{"incident": "idle", "watcher": "guard"}, {"incident": "burst", "watcher": "nobody"}]
    path = tmp_path / "run.json"
    path.write_text(compare.kept_text({"schema": compare.SCHEMA, "scale": 1.0, "scenes": scenes}), encoding="utf-8")
    assert compare.read(path) == {"schema": compare.SCHEMA, "scale": 1.0, "scenes": scenes[::-1]}
    assert sum(line.startswith("  {") for line in path.read_text(encoding="utf-8").splitlines()) == 2
