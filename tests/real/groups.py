"""Which real tests one worker runs in one go, and when: a file's, for they share servers; the longest first, to end together.

`--dist loadfile` would put small files before long ones; `loadgroup` goes by marks, which pytest 9.2 no longer lets
pytest-xdist write into a test's name (pytest-xdist issue 1386).
"""

from __future__ import annotations

from typing import Any

# Seconds beside another on two cores, roughly; what is not here takes less than half a minute.
COSTS_S = {
    "test_standin_conformance": 300, "test_guard_real": 130, "test_survive_real": 265,
    "test_inside_servers": 180, "test_knobs_real": 190, "test_demo_real": 130, "test_monitoring_real": 280,
    "test_guard_pods_real": 170, "test_article_compare_real": 75,
    "test_inside_probe": 110, "test_inside_recorder": 120, "test_survive_features_real": 110,
    "test_inside_gate": 130, "test_engine_real": 70, "test_door_real": 100, "test_kill_mode_real": 100,
    "test_guard_kills_real": 90, "test_image_real": 75, "test_two_guards_real": 90, "test_survive_async_real": 60,
    "test_readme_real": 220, "test_fleet_real": 420, "test_knobs_guard_real": 150,
}  # fmt: skip


def group_of(nodeid: str) -> str:
    """The group of a test: its file."""
    return nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")


def in_order(nodeid: str) -> tuple[float, str]:
    """What to sort by: the longest group first, each of them in one piece."""
    group = group_of(nodeid)
    return -COSTS_S.get(group, 0), group


def scheduler(config: Any, log: Any) -> Any:
    """One that gives whole groups to the workers, in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False  # by the number of tests
    made = LoadScopeScheduling(config, log)
    made._split_scope = group_of  # in place of modules and classes
    return made
