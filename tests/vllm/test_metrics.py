"""Our names for vLLM's figures, release by release."""

from __future__ import annotations

from plimsoll.vllm.metrics import FIGURES, figure, find, metrics_of, on_page, resolve
from plimsoll.vllm.versions import engine_named
from tests.each import each

RELEASES = ("0.6.0", "0.7.3", "0.9.2", "0.11.0", "0.12.0", "0.20.0", "0.24.0", "0.32.0")
WANTED = ("kv_cache_usage", "prefix_hits", "prefix_queries", "running", "waiting", "preemptions", "success")


@each("release", RELEASES)
@each("name", WANTED)
def test_the_figures_everybody_needs_resolve_to_names_that_existed(name: str, release: str) -> None:
    """Every figure resolves in every era, to a metric that the release's own source defines and shows."""
    found = resolve(name, engine_named(release))
    assert found is not None
    known = metrics_of(release)
    assert found.exposition in known
    assert known[found.exposition]["shown"] != "hidden"


@each(
    ("name", "release", "exposition"),
    [
        ("kv_cache_usage", "0.6.0", "vllm:gpu_cache_usage_perc"),
        ("kv_cache_usage", "0.7.3", "vllm:gpu_cache_usage_perc"),
        ("kv_cache_usage", "0.9.2", "vllm:kv_cache_usage_perc"),
        ("kv_cache_usage", "0.11.0", "vllm:kv_cache_usage_perc"),
        ("kv_cache_usage", "0.32.0", "vllm:kv_cache_usage_perc"),
        ("prefix_hits", "0.8.5", "vllm:gpu_prefix_cache_hits_total"),
        ("prefix_hits", "0.12.0", "vllm:prefix_cache_hits_total"),
        ("inter_token", "0.10.1", "vllm:time_per_output_token_seconds"),
        ("inter_token", "0.20.0", "vllm:inter_token_latency_seconds"),
        ("preemptions", "0.6.0", "vllm:num_preemptions_total"),
    ],
)
def test_renames_are_followed(name: str, release: str, exposition: str) -> None:
    """The names that broke other tools' dashboards are right on both sides of each rename."""
    found = resolve(name, engine_named(release))
    assert found is not None
    assert (found.exposition, found.is_exact) == (exposition, True)


def test_what_a_release_does_not_have_is_none_or_a_marked_relative() -> None:
    """A hit rate is offered where there were no hit counters yet, never as the figure itself."""
    found = resolve("prefix_hits", engine_named("0.6.0"))
    assert found is not None
    assert (found.exposition, found.type, found.is_exact) == ("vllm:gpu_prefix_cache_hit_rate", "gauge", False)
    assert resolve("swapped", engine_named("0.32.0")) is None
    assert resolve("admission_rejections", engine_named("0.20.0")) is None


def test_hidden_and_conditional_names_are_said() -> None:
    """In 0.7.3 the hit counters need VLLM_USE_V1=1; where old names are hidden, the shown one is chosen."""
    found = resolve("prefix_hits", engine_named("0.7.3"))
    assert found is not None
    assert (found.exposition, found.shown) == ("vllm:gpu_prefix_cache_hits_total", "conditional")
    found = resolve("kv_cache_usage", engine_named("0.11.0"))
    assert found is not None
    assert found.shown == "always"


def test_an_unknown_build_is_met_by_what_its_page_shows() -> None:
    """Without a version the page decides, newest name first; an empty page shows nothing."""
    both = {"vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"}
    assert on_page("kv_cache_usage", both) == "vllm:kv_cache_usage_perc"
    assert on_page("kv_cache_usage", {"vllm:gpu_cache_usage_perc"}) == "vllm:gpu_cache_usage_perc"
    assert on_page("preemptions", {"vllm:num_preemptions"}) == "vllm:num_preemptions_total"
    assert on_page("kv_cache_usage", set()) is None


def test_a_page_is_asked_by_version_only_where_the_version_is_sure() -> None:
    """A release is looked up by its number and falls back to what is shown; a fork is met by its page alone."""
    old = {"vllm:gpu_cache_usage_perc"}
    assert find("kv_cache_usage", engine_named("0.32.0"), {"vllm:kv_cache_usage_perc", *old}) == "vllm:kv_cache_usage_perc"
    assert find("kv_cache_usage", engine_named("0.32.0"), old) == "vllm:gpu_cache_usage_perc"
    assert find("kv_cache_usage", engine_named("0.32.0+acme"), old) == "vllm:gpu_cache_usage_perc"
    assert find("kv_cache_usage", engine_named("0.32.0"), set()) is None


def test_early_prefix_counters_count_blocks() -> None:
    """Until 0.8.5 the counters held blocks; the unit says so, and from 0.9.0 it is tokens."""
    units = {}
    for release in ("0.8.5", "0.9.2"):
        found = resolve("prefix_hits", engine_named(release))
        assert found is not None
        units[release] = found.unit.value
    assert units == {"0.8.5": "blocks", "0.9.2": "tokens"}


@each("name", [f.name for f in FIGURES])
def test_every_name_we_ask_for_existed_somewhere(name: str) -> None:
    """No figure lists a name that no release ever exported."""
    everywhere = {n for release in ("0.6.0", "0.9.2", "0.10.2", "0.11.0", "0.32.0") for n in metrics_of(release)}
    for candidate in figure(name).names:
        assert candidate in everywhere or candidate.removesuffix("_total") in everywhere, candidate


def test_v0_had_no_engine_label() -> None:
    """A selector that requires the engine label would find nothing on the first engine's page."""
    old = resolve("running", engine_named("0.6.0"))
    new = resolve("running", engine_named("0.32.0"))
    assert old is not None
    assert new is not None
    assert (old.labels, new.labels) == (("model_name",), ("model_name", "engine"))
