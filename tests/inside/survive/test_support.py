"""Where containment is armed, and in words why not elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.survive import support
from tests.inside.survive.fake_core import EngineCore, install_vllm


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch)


def refusal(core: EngineCore, version: str = "0.32.0", *, unproven: bool = False) -> str | None:
    """Why it is not armed."""
    return support.refusal(core, version, unproven=unproven)


def test_a_text_model_on_one_rank_is_armed_where_it_was_shown() -> None:
    """The engine as most people run it."""
    assert refusal(EngineCore()) is None
    assert refusal(EngineCore(), "0.32.0+cpu") is None


@pytest.mark.parametrize("version", ["0.33.0", "0.24.0", "0.32.1.dev3", "1.0", "of unknown version", "0.32.0.post1"])
def test_a_release_that_is_not_known_stays_unarmed_even_unproven(version: str) -> None:
    """Its internals may differ in a way that nobody has looked at."""
    assert "is not known to it" in str(refusal(EngineCore(), version, unproven=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config.world_size": 2}, "this engine has 2 ranks"),
        ({"parallel_config.data_parallel_size": 4}, "data parallel"),
        ({"scheduler_config.enable_chunked_prefill": False}, "chunked prefill"),
    ],
)
def test_what_cannot_be_contained_is_refused_even_unproven(changes: dict[str, Any], says: str) -> None:
    """Ranks that wait in a collective, a step that cannot shrink."""
    core = EngineCore()
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(core.vllm_config, part), name, value)
    assert says in str(refusal(core, unproven=True))


def test_a_connector_or_another_executor_is_refused() -> None:
    """Blocks that another engine holds; workers that nobody can ask."""
    core = EngineCore()
    core.scheduler.connector = SimpleNamespace()  # type: ignore[assignment]
    assert "connector" in str(refusal(core, unproven=True))
    other = EngineCore()
    other.model_executor = SimpleNamespace()  # type: ignore[assignment]
    assert "executor" in str(refusal(other, unproven=True))


def test_each_feature_alone_is_not_their_mixture() -> None:
    """Pictures ran, asynchronous scheduling ran; both together did not."""
    core = EngineCore()
    core.vllm_config.model_config.is_multimodal_model = True
    assert refusal(core) is None
    core.batch_queue = []
    assert "together" in str(refusal(core))


def test_pictures_that_must_not_be_cut_another_scheduler_and_another_device_are_refused() -> None:
    """Smaller steps would cut the picture; a scheduler of somebody else's is not known; AMD's error reads otherwise."""
    core = EngineCore()
    core.vllm_config.model_config.is_multimodal_model = True
    core.vllm_config.scheduler_config.disable_chunked_mm_input = True
    assert "must not be cut" in str(refusal(core, unproven=True))
    other = EngineCore()
    other.scheduler.__class__ = type("MyScheduler", (type(other.scheduler),), {"__module__": "my.scheduler"})
    assert "MyScheduler is not vLLM's own" in str(refusal(other, unproven=True))
    platform: Any = sys.modules["vllm.platforms"]
    platform.current_platform.is_cpu = lambda: False
    assert "NVIDIA" in str(refusal(EngineCore(), unproven=True))


def test_what_ran_nowhere_needs_the_operators_word() -> None:
    """It is named, and `unproven` arms it."""
    core = EngineCore()
    core.vllm_config.model_config.runner_type = "pooling"
    core.vllm_config.model_config.is_encoder_decoder = True
    assert "text, pooling, encoder-decoder models together, with vLLM 0.32.0 and the first runner, was" in str(refusal(core))
    assert refusal(core, unproven=True) is None
    second = EngineCore()
    second.vllm_config.use_v2_model_runner = True
    assert "second runner was never tried" in str(refusal(second))


@pytest.mark.parametrize("name", ["prev_step_scheduled_req_ids", "max_num_running_reqs", "sched_step_seq", "num_spec_tokens"])
def test_a_scheduler_without_a_name_it_needs_is_refused(name: str) -> None:
    """A fork, or a release that was patched."""
    core = EngineCore()
    delattr(core.scheduler, name)
    assert f"Scheduler has no {name}" in str(refusal(core, unproven=True))


def test_a_request_or_a_step_of_another_form_is_refused() -> None:
    """0.25's counter is not in a request of 0.32; a step that hides its plan cannot be read."""
    assert "a request has no async_tokens_to_discard" in str(refusal(EngineCore(), "0.25.1", unproven=True))
    core = EngineCore()
    core.step_fn = lambda: ({}, False)
    assert "under another name" in str(refusal(core, unproven=True))
    old = EngineCore()
    old.scheduler.reset_prefix_cache = old.scheduler.schedule  # type: ignore[method-assign, assignment]
    assert "cannot preempt" in str(refusal(old, unproven=True))


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
