"""A plan read back, and what is no plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.assets.launch_command import facts_of, planned_line, release_of, why_it_does_not_fit
from plimsoll.errors import BadInput
from tests.assets.plans import MODELS, plan_of

PLAN = plan_of("vllm", "serve", MODELS[0], "--max-model-len", "8k", "--tensor-parallel-size", "2")


def test_the_figures_are_the_plans() -> None:
    """Sizes, tokens and parallelism as `plan --json` has them."""
    facts = facts_of(PLAN, "p")
    assert (facts.model, facts.fits, facts.gpus, facts.tensor_parallel) == (MODELS[0], True, 2, 2)
    assert facts.kv_tokens == PLAN["kv"]["tokens"]
    assert facts.slack_bytes == PLAN["ledger"]["slack"]["value"]
    assert release_of(PLAN, "p") == "0.32.0"
    assert planned_line(PLAN, "p").startswith("vllm serve ")


def _paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [path]
    return [path, *(found for key, inner in value.items() for found in _paths(inner, (*path, key)))]


@given(st.sampled_from(_paths(PLAN)), st.none() | st.text(max_size=3) | st.integers() | st.lists(st.none(), max_size=1))
def test_a_plan_with_a_hole_is_refused_in_one_line_or_read(path: tuple[str, ...], instead: object) -> None:
    """Whatever stands in the place of a value: facts or BadInput, never another error."""
    plan = json.loads(json.dumps(PLAN))
    if not path:
        return
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = instead
    said = _said(plan)
    assert said == "" or (said.startswith("p: ") and "\n" not in said)


def _said(plan: dict[str, Any]) -> str:
    try:
        facts_of(plan, "p")
        planned_line(plan, "p")
        why_it_does_not_fit(plan)
    except BadInput as error:
        return str(error)
    return ""


def test_what_is_no_plan_is_said() -> None:
    """Another object of ours, or two commands in one."""
    with pytest.raises(BadInput, match="not a plan"):
        facts_of({"schema": "plimsoll.flags/1"}, "p")
    with pytest.raises(BadInput, match="several commands"):
        planned_line({**PLAN, "flags": {"rewritten": "vllm serve a\nvllm serve b"}}, "p")


def test_a_plan_says_why_it_does_not_fit() -> None:
    """By its first finding, and in general words where it has none."""
    assert why_it_does_not_fit({"findings": [{"title": "the weights do not fit"}]}) == "the weights do not fit"
    assert why_it_does_not_fit({}) == "too little memory"
