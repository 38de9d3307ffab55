"""A plan read back, and its command made ready: flags, timers, allocator, secrets, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.assets.launch_command import Ready, facts_of, planned_line, release_of, why_it_does_not_fit
from plimsoll.errors import BadInput
from tests.assets.plans import MODELS, SECRET, made_ready, plan_of
from tests.each import cases, each

LLAMA = MODELS[0]
PLAN = plan_of("vllm", "serve", LLAMA, "--max-model-len", "8k", "--tensor-parallel-size", "2")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SEGMENTS = (ALLOCATOR, "expandable_segments:True")


def test_the_figures_are_the_plans() -> None:
    """Sizes, tokens and parallelism as `plan --json` has them; its first finding says why it does not fit."""
    facts = facts_of(PLAN, "p")
    assert (facts.model, facts.fits, facts.gpus, facts.tensor_parallel) == (LLAMA, True, 2, 2)
    assert facts.kv_tokens == PLAN["kv"]["tokens"]
    assert facts.slack_bytes == PLAN["ledger"]["slack"]["value"]
    assert release_of(PLAN, "p") == "0.32.0"
    assert planned_line(PLAN, "p").startswith("vllm serve ")
    assert why_it_does_not_fit({"findings": [{"title": "the weights do not fit"}]}) == "the weights do not fit"
    assert why_it_does_not_fit({}) == "too little memory"
    with pytest.raises(BadInput, match="not a plan"):
        facts_of({"schema": "plimsoll.flags/1"}, "p")
    with pytest.raises(BadInput, match="several commands"):
        planned_line({**PLAN, "flags": {"rewritten": "vllm serve a\nvllm serve b"}}, "p")


def _paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    return [path, *(found for key, below in inner for found in _paths(below, (*path, key)))]


@given(st.sampled_from(_paths(PLAN)[1:]), st.none() | st.text(max_size=3) | st.integers() | st.lists(st.none(), max_size=1))
def test_a_plan_with_a_hole_is_refused_in_one_line_or_read(path: tuple[str, ...], instead: object) -> None:
    """Whatever stands in the place of a value: facts or BadInput, never another error."""
    plan = inner = json.loads(json.dumps(PLAN))
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = instead
    why_it_does_not_fit(plan)
    said = ""
    for read in (facts_of, planned_line):
        try:
            read(plan, "p")
        except BadInput as error:
            said = str(error)
    assert said == "" or (said.startswith("p: ") and "\n" not in said)


def _ready(*words: str, vllm: str = "0.32.0", gpu: str = "H100", before: str = "") -> Ready:
    env = ("env", before) if before else ()
    return made_ready(plan_of(*env, "vllm", "serve", LLAMA, *words, vllm=vllm, gpu=gpu))


def test_inside_and_a_time_to_shut_down_are_added() -> None:
    """A plain command gets the probe, the gate and a minute for requests in flight; its own port and timeout stay."""
    command = _ready().command
    assert command.words == (
        "vllm", "serve", LLAMA, "--shutdown-timeout", "60", "--worker-extension-cls", "plimsoll.inside.Probe",
        "--middleware", "plimsoll.inside.Gate",
    )  # fmt: skip
    assert (command.has_gate, command.port) == (True, 8000)
    found = _ready("--port", "9001", "--served-model-name", "a", "b", "--shutdown-timeout", "90")
    assert (found.command.port, found.timers.shutdown_s) == (9001, 90)
    assert found.command.words.count("--shutdown-timeout") == 1
    own = _ready("--worker-extension-cls", "my.Ext").command  # vLLM takes one: the probe then comes as a plugin
    assert ("PLIMSOLL_PROBE", "plugin") in own.environment
    assert "plimsoll.inside.Probe" not in own.words
    assert _ready("--nnodes", "1").command.has_gate, "the default, spelled out"


@each(
    ("words", "before", "note"),
    [
        (("--shutdown-timeout", "5"), "", "--shutdown-timeout 5 became 10"),
        (("--shutdown-timeout", "40000"), "", "--shutdown-timeout 40000 became 1500"),
        ((), "VLLM_SERVER_DEV_MODE=1", "VLLM_SERVER_DEV_MODE"),
        ((), "VLLM_USE_RUST_FRONTEND=1", "guard only observes"),
        (("--tensor-parallel-size", "2"), f"{ALLOCATOR}=expandable_segments:True", "may not start"),
    ],
)
def test_what_is_changed_or_has_to_be_known_is_noted(words: tuple[str, ...], before: str, note: str) -> None:
    """A timeout that cannot be, admin endpoints that are open, a server without a gate, an allocator of one's own."""
    found = _ready(*words, before=before)
    assert any(note in said for said in found.notes)
    assert found.command.has_gate is ("--middleware" in found.command.words) is ("RUST" not in before)


@each("vllm", ["0.8.0", "0.10.2", "0.12.0", "0.17.1", "0.20.0", "0.25.1", "0.32.0"])
def test_every_release_from_0_8_on_gets_the_gate(vllm: str) -> None:
    """No release is given a flag that it lacks: where there is no --shutdown-timeout the gate waits, and that is said."""
    found = _ready(vllm=vllm)
    assert found.command.has_gate
    says = any("has no --shutdown-timeout" in note for note in found.notes)
    assert ("--shutdown-timeout" in found.command.words) is not says
    assert says or vllm != "0.17.1"


def test_secrets_become_variables_that_are_filled_in_by_hand() -> None:
    """Neither a key nor a token reaches a file, and neither does the mark that hides them."""
    token = "hf_abcdefghijklmnopqrstuvwxyz012345"
    found = _ready("--api-key", SECRET, "--hf-token", token, before=f"OTHER_TOKEN={SECRET}")
    assert set(found.command.secrets) == {"VLLM_API_KEY", "HF_TOKEN", "OTHER_TOKEN"}
    assert "redacted" not in repr(found.command)
    assert "--api-key" not in found.command.words


@each(("words", "gpu", "before", "expected"), cases("assets", "expandable_segments_where_they_help"))
def test_expandable_segments_where_they_help(words: tuple[str, ...], gpu: str, before: str, expected: str | None) -> None:
    """One NVIDIA card, plain serving; not beside several GPUs, a pool of vLLM's own or a connector; one's own stays."""
    found = [pair for pair in _ready(*words, gpu=gpu, before=before).command.environment if pair[0] == ALLOCATOR]
    assert found == ([(ALLOCATOR, expected)] if expected else [])


@each(("words", "said"), cases("assets", "what_cannot_be_launched_is_refused_in_one_line"))
def test_what_cannot_be_launched_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    """No file is better than one that does not start."""
    with pytest.raises(BadInput, match=said) as caught:
        _ready(*words)
    assert "\n" not in str(caught.value)
