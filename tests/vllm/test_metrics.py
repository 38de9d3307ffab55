"""Our names for vLLM's figures, release by release."""

from __future__ import annotations

from plimsoll.vllm.metrics import FIGURES, figure, find, metrics_of, on_page, resolve
from plimsoll.vllm.versions import engine_named
from tests.each import each, rows, sure
from tests.vllm.test_flags import CASES

RELEASES = ("0.6.0", "0.7.3", "0.9.2", "0.11.0", "0.12.0", "0.20.0", "0.24.0", "0.32.0")
WANTED = ("kv_cache_usage", "prefix_hits", "prefix_queries", "running", "waiting", "preemptions", "success")


@each("release", RELEASES)
@each("name", WANTED)
def test_the_figures_everybody_needs_resolve_to_names_that_existed(name: str, release: str) -> None:
    """Every figure resolves in every era, to a metric that the release's own source defines and shows."""
    found = sure(resolve(name, engine_named(release)))
    known = metrics_of(release)
    assert found.exposition in known
    assert known[found.exposition]["shown"] != "hidden"


@each(("name", "release", "expected"), rows(CASES, "figures"))
def test_a_figure_in_a_release(name: str, release: str, expected: str) -> None:
    """Its name on both sides of each rename that broke other tools' dashboards, its unit, and whether it is shown."""
    found = resolve(name, engine_named(release))
    is_exact = "exact" if found is not None and found.is_exact else "near"
    shown = "-" if found is None else f"{found.exposition} {found.type} {found.unit.value} {is_exact} {found.shown}"
    assert shown == expected


def test_the_first_engine_had_no_engine_label_and_an_unknown_build_is_met_by_what_its_page_shows() -> None:
    """A selector that requires one would find nothing; without a version the page decides, newest name first."""
    for release, labels in (("0.6.0", ("model_name",)), ("0.32.0", ("model_name", "engine"))):
        assert sure(resolve("running", engine_named(release))).labels == labels
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


@each("name", [f.name for f in FIGURES])
def test_every_name_we_ask_for_existed_somewhere(name: str) -> None:
    """No figure lists a name that no release ever exported."""
    everywhere = {n for release in ("0.6.0", "0.9.2", "0.10.2", "0.11.0", "0.32.0") for n in metrics_of(release)}
    for candidate in figure(name).names:
        assert candidate in everywhere or candidate.removesuffix("_total") in everywhere, candidate
