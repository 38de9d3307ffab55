"""Every wait ends before the one around it, whatever was planned."""

from __future__ import annotations

import json
import random
import re
import tomllib

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.assets.launch import WAYS, launch_files, leaving_s
from plimsoll.assets.settings import TEARDOWN_S, timers_of
from tests.assets.plans import random_plan, settings_of
from tests.each import times

GUARDS_LONGEST_STOP_S = 1800
GUARDS_LONGEST_START_S = 86400


@given(st.none() | st.integers(10, 1500) | st.integers(-(2**40), 2**40), st.integers(-(2**50), 2**50))
def test_the_timers_nest_whatever_is_wished_for(shutdown_s: int | None, weights_bytes: int) -> None:
    """drain < shutdown < stop < grace < evict, and within what guard takes; a wish that can be met is met."""
    timers = timers_of(shutdown_s, weights_bytes)
    assert 0 < timers.drain_s < timers.shutdown_s < timers.stop_s < timers.grace_s < timers.evict_s <= GUARDS_LONGEST_STOP_S
    assert timers.drain_s + timers.shutdown_s + TEARDOWN_S <= timers.stop_s
    assert shutdown_s not in range(10, 1501) or timers.shutdown_s == shutdown_s
    assert 60 <= timers.start_s <= 2 * timers.start_s <= GUARDS_LONGEST_START_S


def test_more_weights_are_given_more_time() -> None:
    """Seventy billion parameters may take longer to read than eight."""
    assert timers_of(None, 140 * 10**9).start_s > timers_of(None, 16 * 10**9).start_s > timers_of().start_s


@settings(max_examples=times(8, 500))
@given(st.integers(0, 2**32))
def test_the_files_of_a_random_plan_nest(seed: int) -> None:
    """Read back from the files themselves: preStop and shutdown end within the grace of systemd, compose and Kubernetes."""
    made = settings_of(random_plan(random.Random(seed)))
    files = launch_files(made, WAYS)
    assert made.command is not None
    words = list(made.command.words)
    shutdown = int(words[words.index("--shutdown-timeout") + 1])
    pod = next(one for one in yaml.safe_load_all(files["kubernetes/vllm.yaml"]) if one["kind"] == "StatefulSet")["spec"]
    pod = pod["template"]["spec"]
    container = pod["containers"][0]
    before_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][3])
    assert before_stop == leaving_s(made)
    unit = re.search(r"TimeoutStopSec=(\d+)", files["systemd/vllm.service"])
    compose = yaml.safe_load(files["compose/compose.yaml"])["services"]["vllm"]["stop_grace_period"]
    assert unit is not None
    graces = {
        "systemd": int(unit[1]),
        "compose": int(compose.removesuffix("s")),
        "kubernetes": pod["terminationGracePeriodSeconds"],
    }
    for way, grace in graces.items():
        guard_s = int(tomllib.loads(files[f"{way}/plimsoll.toml"])["act"]["stop_within"].removesuffix("s"))
        assert before_stop < shutdown < before_stop + shutdown + TEARDOWN_S <= min(grace, guard_s)
        # Guard's own SIGKILL comes before systemd's and Docker's; a pod is killed by Kubernetes, and guard waits for that.
        assert guard_s > grace if way == "kubernetes" else guard_s < grace
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= made.timers.start_s
    assert "ready" not in json.dumps(container["livenessProbe"])
