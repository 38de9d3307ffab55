"""docs/launch.md: its unit is the one that is made, its timers are those that are reckoned."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from plimsoll.assets.inside_wheel import wheel_name
from plimsoll.assets.launch import WAYS, launch_files
from plimsoll.assets.settings import timers_of
from tests.assets.plans import plan_of, settings_of

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
MADE = dataclasses.replace(
    settings_of(plan_of("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "32k", memory_gib="79.19")),
    wheel=wheel_name(),
)


def test_the_unit_on_the_page_is_the_one_that_is_made() -> None:
    """To the letter, without the lines on top that say what made it."""
    shown = re.search(r"<!-- unit:.*?```ini\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == launch_files(MADE, WAYS)["systemd/vllm.service"]


def test_the_timers_on_the_page_are_those_that_are_reckoned() -> None:
    """With the default, and with the weights of the example."""
    table = PAGE.partition("<!-- timers")[2].partition("<!-- end of timers")[0]
    shown = {name: int(seconds) for name, seconds in re.findall(r"^\| (\w+) \| (\d+) s \|", table, re.MULTILINE)}
    timers = MADE.timers
    assert shown == {
        "drain": timers.drain_s, "shutdown": timers.shutdown_s, "stop": timers.stop_s, "grace": timers.grace_s,
        "evict": timers.evict_s, "start": timers.start_s,
    }  # fmt: skip
    assert timers == dataclasses.replace(timers_of(), start_s=timers.start_s)


def test_the_files_on_the_page_are_those_that_are_made() -> None:
    """The list below the command, with what lies beside the texts."""
    listed = re.findall(r"^  (systemd/\S+)$", PAGE, re.MULTILINE)
    beside = {"systemd/plan.json", f"systemd/{MADE.wheel}"}
    assert set(listed) == {*launch_files(MADE, ["systemd"]), *beside}
    for path in re.findall(r"out/((?:systemd|compose|kubernetes)/[\w.-]+\.\w+)", PAGE):
        assert path in {*launch_files(MADE, WAYS), *beside}, path
