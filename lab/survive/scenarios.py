"""Scenarios for the engine core over a worker without a model: drawn at random, and played by the engine's own Python."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.engine.install import engine_home, model_home
from lab.engine.server import clean_environment
from lab.survive.server import ROOT, plugin_site

LIMIT_S = 600.0


def random_scenarios(count: int, seed: int) -> list[dict[str, Any]]:
    """So many scenarios of every kind: both runners, both ways of scheduling, few blocks, prefix caching, leaving clients."""
    dice = random.Random(seed)
    return [
        {
            "seed": seed * 10_000 + number, "asynchronous": dice.random() < 0.7, "runner": dice.choice(("first", "second")),
            "late": dice.random() < 0.5, "share": dice.choice((0.05, 0.1, 0.2, 0.3)), "blocks": dice.choice((30, 45, 70, 400)),
            "batched_tokens": dice.choice((64, 96, 256, 512)), "sequences": dice.choice((4, 8, 16)),
            "prefix_caching": dice.random() < 0.7, "aborts": dice.choice((0.0, 0.05, 0.2)),
            "structured": dice.choice((0, 0, 3)), "longest_output": dice.choice((10, 40, 80)),
            "calm_s": dice.choice((0.05, 2.0, 12.0)),
        }
        for number in range(count)
    ]  # fmt: skip


def turned_scenarios(count: int, seed: int, turns: float = 0.5) -> list[dict[str, Any]]:
    """The same with knobs that turn at random, every second one without failures; before and since 0.31's admission."""
    return [
        {
            **scenario,
            "turns": turns,
            "share": scenario["share"] * (number % 2),
            "is_old_admission": number % 3 == 0,
            "requests": 40,
            "pause": 40,  # a knob makes steps so small that a prompt takes many
        }
        for number, scenario in enumerate(random_scenarios(count, seed))
    ]


def without_faults(scenario: dict[str, Any]) -> dict[str, Any]:
    """The same scenario, undisturbed."""
    return {**scenario, "share": 0.0, "planned": {}}


def play_scenarios(
    scenarios: Iterable[dict[str, Any]], folder: Path, limit_s: float = LIMIT_S, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What became of each scenario, in their order; all in one process, armed as vLLM's plugins are."""
    own = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), str(plugin_site(folder / "site")))),
        "VLLM_PLUGINS": "plimsoll_survive,plimsoll_probe",
        "PLIMSOLL_SURVIVE": "unproven",  # on a CPU asynchronous scheduling and the second runner are nothing that vLLM offers
        "PLIMSOLL_SURVIVE_STORM": "0",
        "PLIMSOLL_DIR": str(folder / "run"),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        **(env or {}),
    }
    lines = "".join(json.dumps(scenario) + "\n" for scenario in scenarios)
    command = [str(engine_home() / "bin" / "python"), "-m", "lab.survive.async_core", str(model_home())]
    done = subprocess.run(command, input=lines, env=own, capture_output=True, text=True, timeout=limit_s, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == lines.count("\n"), f"{len(answers)} answers\n{done.stderr[-3000:]}"
    return answers
