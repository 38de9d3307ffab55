"""Where containment is armed, and in words why not elsewhere."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plimsoll.inside.survive import support
from tests.each import cases, each
from tests.inside.survive.fake_core import EngineCore, install_vllm


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch)


def refusal(core: EngineCore, version: str = "0.32.0", *, unproven: bool = False) -> str | None:
    return support.refusal(core, version, unproven=unproven)


def changed(*paths: str) -> EngineCore:
    """A core with `part.name=value` set; a bare name is deleted from its scheduler."""
    core: Any = EngineCore()
    for path in paths:
        where, _, value = path.partition("=")
        owner, _, name = where.rpartition(".")
        if not value:
            delattr(core.scheduler, name)
            continue
        part = core
        for step in filter(None, owner.split(".")):
            part = getattr(part, step)
        setattr(part, name, ast.literal_eval(value))
    return cast("EngineCore", core)


CONFIG, MODEL = "vllm_config", "vllm_config.model_config"
PICTURES = f"{MODEL}.is_multimodal_model=True"


@each(("paths", "version", "says"), cases("inside", "what_is_not_known_or_cannot_be_contained"))
def test_what_is_not_known_or_cannot_be_contained_is_refused_even_unproven(
    paths: tuple[str, ...], version: str, says: str
) -> None:
    """A release or a fork that nobody looked at, ranks that wait in a collective, a step that cannot shrink: even unproven."""
    assert says in str(refusal(changed(*paths), version, unproven=True))


def test_a_scheduler_a_step_or_a_device_of_another_form_is_refused() -> None:
    """Somebody else's scheduler, one that cannot preempt, a step that hides its plan; AMD's error reads otherwise."""
    other, hidden, old = EngineCore(), EngineCore(), EngineCore()
    other.scheduler.__class__ = type("MyScheduler", (type(other.scheduler),), {"__module__": "my.scheduler"})
    assert "never tried with the scheduler MyScheduler" in str(refusal(other, unproven=True))
    hidden.step_fn = lambda: ({}, False)
    assert "under another name" in str(refusal(hidden, unproven=True))
    old.scheduler.reset_prefix_cache = old.scheduler.schedule  # type: ignore[method-assign, assignment]
    assert "cannot preempt" in str(refusal(old, unproven=True))
    platform: Any = sys.modules["vllm.platforms"]
    platform.current_platform.is_cpu = lambda: False
    assert "NVIDIA" in str(refusal(EngineCore(), unproven=True))


def test_what_ran_is_armed_and_what_ran_nowhere_needs_the_operators_word() -> None:
    """Pictures ran, asynchronous scheduling ran; both together did not. It is named, and `unproven` arms it."""
    assert [refusal(EngineCore(), version) for version in ("0.32.0", "0.32.0+cpu")] == [None, None]
    assert refusal(changed(PICTURES)) is None
    assert "together" in str(refusal(changed(PICTURES, "batch_queue=[]")))
    pooling = changed(f"{MODEL}.runner_type='pooling'", f"{MODEL}.is_encoder_decoder=True")
    assert "text, pooling, encoder-decoder models together, with vLLM 0.32.0 and the first runner, was" in str(refusal(pooling))
    assert refusal(pooling, unproven=True) is None
    assert "second runner was never tried" in str(refusal(changed(f"{CONFIG}.use_v2_model_runner=True")))


def test_every_feature_that_is_asked_for_has_a_word_in_the_list() -> None:
    """What `inside check` lists is what arming asks."""
    core = EngineCore()
    core.batch_queue = []
    model = core.vllm_config.model_config
    model.enforce_eager, model.is_multimodal_model, model.runner_type = False, True, "pooling"
    model.is_encoder_decoder = model.enable_sleep_mode = True
    core.vllm_config.lora_config = SimpleNamespace()
    core.vllm_config.speculative_config = SimpleNamespace(method="ngram")
    core.model_executor.__class__ = type("MultiprocExecutor", (type(core.model_executor),), {})
    core.vllm_config.compilation_config = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"))
    core.scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=(SimpleNamespace(kv_cache_spec=MambaSpec()),))
    core.vllm_config.cache_config = SimpleNamespace(mamba_block_size=528)
    assert support.features_of(core) == [feature for feature in support.FEATURES if feature != "other drafts"]
    core.vllm_config.speculative_config.method = "eagle"
    assert "other drafts" in support.features_of(core)
    assert support.state_block(core) == 528
    scheduler: Any = core.scheduler
    scheduler.need_mamba_block_aligned_split = False  # without prefix caching a "block" is as long as the longest context
    assert support.state_block(core) == 0
    assert support.state_block(EngineCore()) == 0


class MambaSpec:
    """A layer with a recurrent state."""


def test_what_is_proven_is_told_by_release() -> None:
    """A line for each runner, or the one reason why nowhere."""
    lines = support.proven_lines("0.32.0+cpu")
    assert lines[0].startswith("first runner: armed with text")
    assert any(line.startswith("second runner: not armed") for line in lines)
    assert support.proven_lines("0.9.2") == ["not armed: vLLM 0.9.2 is not known to it: it knows 0.25 to 0.32"]
    assert {runner for _, runner in support.PROVEN} == {support.FIRST, support.SECOND}
    assert all(one <= set(support.FEATURES) for shown in support.PROVEN.values() for one in shown)
    assert {release for release, _ in support.PROVEN} <= support.ADAPTERS.keys()


def test_the_page_lists_what_is_proven() -> None:
    """docs/survive.md has a row for each release and runner that is armed, with just its features."""
    page = (Path(__file__).parents[3] / "docs" / "survive.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- proven -->")[2].partition("<!-- end of proven -->")[0].strip().splitlines()[2:]
    listed: dict[tuple[tuple[int, int], str], tuple[frozenset[str], ...]] = {}
    for row in rows:
        releases, runner, features, _where = (cell.strip() for cell in row.strip("|").split("|"))
        for release in releases.split(","):
            major, minor = release.strip().split(".")
            key = ((int(major), int(minor)), runner)
            listed[key] = (*listed.get(key, ()), frozenset(part.strip() for part in features.split(",")))
    assert listed == support.PROVEN
