"""Which real tests one worker runs in one go, and when: the longest first, so that both workers end together.

`--dist loadgroup` would do it by marks, and does not: pytest 9.2 no longer lets pytest-xdist write a group into a test's name
(pytest-xdist issue 1386), so that every test went to whichever worker was free, and each server was started by both.
"""

from __future__ import annotations

from typing import Any

# Files that share what tests/real/conftest.py starts once in a session.
TOGETHER = {
    "engine": ("test_doctor_metrics", "test_engine_lab", "test_engine_look_real", "test_metrics_page"),
    "parser": ("test_launch_real", "test_parser_agrees"),
    "planner": ("test_kv_planner", "test_plan_refusals"),
}
# Seconds beside another on two cores, roughly; what is not here takes less than half a minute.
COSTS_S = {
    "test_guard_acts_real": 380, "test_standin_conformance": 300, "test_guard_real": 270, "test_survive_real": 265,
    "test_inside_servers": 180, "test_knobs_real": 190, "test_demo_real": 100, "test_monitoring_real": 180,
    "test_guard_pods_real": 170, "test_tutorial_real": 160, "test_article_compare_real": 75,
    "test_doctor_real": 130, "test_inside_probe": 110, "test_inside_recorder": 120, "test_survive_features_real": 110,
    "test_inside_gate": 130, "engine": 70, "test_door_real": 100, "test_kill_mode_real": 100, "test_guard_kills_real": 90,
    "test_image_real": 75, "test_two_guards_real": 60, "test_survive_async_real": 60,
    "test_readme_real": 60, "test_fleet_real": 130,
    "test_knobs_guard_real": 150,
}  # fmt: skip
_GROUPS = {file: group for group, files in TOGETHER.items() for file in files}


def group_of(nodeid: str) -> str:
    """The group of a test: its file, or what that file shares with others."""
    file = nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
    return _GROUPS.get(file, file)


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
