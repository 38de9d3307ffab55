"""Labels on a page of metrics: what is written is what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.vllm.metrics_page import escaped_label, parse_page


@pytest.mark.parametrize("value", ['a "name"', "a\\b", "a\nb", "\\n", '\\"'])
def test_others_read_a_label_as_it_was(value: str) -> None:
    """Quotes, backslashes and line ends do not end a label early, for Prometheus' own reader too."""
    (family,) = text_string_to_metric_families(f'g{{x="{escaped_label(value)}"}} 1\n')
    assert family.samples[0].labels == {"x": value}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_label_comes_back(value: str) -> None:
    """Whatever a model is called."""
    page = parse_page(f'g{{x="{escaped_label(value)}"}} 1\n'.encode(), "page", None)
    assert [sample.labels for sample in page.of("g")] == [{"x": value}]
