"""The stages that are measured on a GPU: what a stage may hold, and that a dry run needs nothing else."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from lab.arrivals import Traffic
from lab.gpu.measure_service import all_servers
from lab.gpu.provoke_failures import HERE
from lab.gpu.service_bench import total
from plimsoll.vllm.flags import flags_of

PLAN: dict[str, Any] = json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))
VERBS = {"load": 4, "start": 2, "stop": 2, "warm-up": 2, "say": 3}


def test_every_step_speaks_of_what_there_is() -> None:
    """Servers, traffic and models have names that are known; no two loads write the same file."""
    labels: Counter[str] = Counter()
    for stage in PLAN["stages"].values():
        assert set(all_servers(stage)) <= set(PLAN["servers"])
        for step in stage["steps"]:
            assert len(step) >= VERBS[step[0]], step
            if step[0] == "load":
                assert step[3] in PLAN["traffic"]
                labels[step[2]] += 1
                assert step[2].rsplit("-", 1)[1].isdigit(), "the number of its round, which makes its prompts its own"
    assert set(labels.values()) == {1}
    assert {spec["model"] for spec in PLAN["servers"].values()} <= set(PLAN["models"])
    for spec in PLAN["traffic"].values():
        Traffic(**{key: value for key, value in spec.items() if key != "promise"}).arrivals()


def test_every_flag_is_one_of_the_release_that_runs_there() -> None:
    """A start that the parser refuses would cost minutes of a GPU."""
    known = flags_of("0.25.1")
    for spec in PLAN["servers"].values():
        assert [flag for flag in spec["flags"] if flag.startswith("--") and flag not in known] == []


def test_the_sum_over_all_rows_of_a_metric() -> None:
    """Of that metric, not of one that begins like it."""
    page = 'vllm:num_preemptions_total{engine="0"} 2.0\nvllm:num_preemptions_total{engine="1"} 3.0\nvllm:num_preemptions 9\n'
    assert total(page, "num_preemptions_total") == 5.0
    assert total(page, "prompt_tokens_total") == 0.0
