"""Saved pages of one server are compared, those of several are not."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from plimsoll.doctor.rules.metrics import chains, judge_saved
from plimsoll.findings import Code, Severity
from plimsoll.vllm.metrics_page import Page, parse_page, read_page

CAPTURES = Path(__file__).parents[2] / "captures"
STORM = [
    read_page(str(CAPTURES / "vllm-0.25.1-h200-failures" / f"preemption-storm.metrics-{when}.txt"), when)
    for when in ("before", "during", "after")
]


def page(name: str, text: str) -> Page:
    """A page of one engine with this beside its gauges."""
    return parse_page(f'vllm:num_requests_running{{engine="0"}} 1\n{text}\n'.encode(), name, None)


def test_counters_tell_the_order() -> None:
    """However the files are named and in whatever order they are given."""
    for given in permutations(STORM):
        assert [[given[place].source for place in chain] for chain in chains(given)] == [["before", "during", "after"]]


@pytest.mark.parametrize("given", [(STORM[0], STORM[2]), (STORM[2], STORM[0])])
def test_a_storm_between_two_pages_is_seen_as_one(given: tuple[Page, Page]) -> None:
    """What was counted between the looks is told, and the first page no longer says that it cannot tell when."""
    (first, calm), (second, stormy) = judge_saved(given)
    assert (first.source, calm.findings, second.source) == ("before", (), "after")
    found = stormy.findings[0]
    assert (found.code, found.severity) == (Code.KV_PREEMPTION_STORM, Severity.CRITICAL)
    assert "191 preemptions between the two looks" in found.because
    assert found.evidence[0].source == "after"


def test_a_storm_that_was_over_before_the_first_page_is_a_word() -> None:
    """The same page twice: nothing was counted in between."""
    _, (_, verdict) = judge_saved([STORM[2], STORM[2]._replace(source="again")])
    assert [one.severity for one in verdict.findings] == [Severity.INFO]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("process_start_time_seconds 1", "process_start_time_seconds 2"),
        ("vllm:num_preemptions_created 1", "vllm:num_preemptions_created 2"),
        ("", ""),
        (
            "process_start_time_seconds 1\nvllm:prompt_tokens_total 1\nvllm:generation_tokens_total 9",
            "process_start_time_seconds 1\nvllm:prompt_tokens_total 5\nvllm:generation_tokens_total 1",
        ),
    ],
)
def test_pages_that_are_not_surely_of_one_server_stay_apart(one: str, other: str) -> None:
    """Another start, no word of the start, or counters that rose and fell: each page is judged by itself."""
    assert chains([page("one", one), page("other", other)]) == [[0], [1]]


def test_the_birth_of_its_counters_names_a_server_too() -> None:
    """Pages without the process's own figures have that."""
    born = "vllm:num_preemptions_created 7\nvllm:num_preemptions_total"
    assert chains([page("late", f"{born} 5"), page("early", f"{born} 1")]) == [[1, 0]]


def test_a_cache_that_was_full_at_the_first_look_is_not_forgotten() -> None:
    """A hint stays one, where the later page shows an idle server."""
    full = (
        'process_start_time_seconds 1\nvllm:num_requests_waiting{engine="0"} 50\nvllm:kv_cache_usage_perc{engine="0"} 0.99\n'
        'vllm:generation_tokens_total{engine="0"} '
    )
    idle = full.replace("} 50", "} 0").replace("0.99", "0.0")
    (_, first), (_, second) = judge_saved([page("full", f"{full}1"), page("idle", f"{idle}9")])
    assert ([one.code for one in first.findings], second.findings) == ([Code.KV_SATURATED], ())
