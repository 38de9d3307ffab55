"""Traffic in a few numbers, then and now."""

from __future__ import annotations

import pytest

from plimsoll.simulate.trace import make_trace
from plimsoll.tune.answer import drift, fingerprint
from plimsoll.tune.goodput import Traffic
from tests.tune.servers import traffic


def test_traffic_has_numbers_and_longer_prompts_have_changed_it() -> None:
    """Rates, lengths and what was seen before; small changes are no news, and all at once has no rate."""
    second = 10**9
    ids = [[1, 2], [1, 2], [1, 3]]
    trace = make_trace("three", [0, second, 2 * second], [10, 20, 60], [1, 2, 3], ids=ids, prefix_block=8)
    found = fingerprint(Traffic(trace, 2.0))
    assert (found.requests, found.span_s, found.rate) == (3, 1.0, 3.0)
    assert found.prompt_mean == 30
    assert found.prompt_p99 == 60
    assert found.shared == pytest.approx(0.5)
    before = fingerprint(traffic())
    assert not any(change.is_large for change in drift(before, before))
    after = before._replace(prompt_mean=1.5 * before.prompt_mean, rate=1.1 * before.rate, shared=before.shared + 0.3)
    assert {change.name for change in drift(before, after) if change.is_large} == {"prompt_mean", "shared"}
    found = fingerprint(Traffic(make_trace("at once", [0, 0], [8, 8], [1, 1])))
    assert (found.rate, found.busiest_minute_rate, found.shared) == (0.0, 0.0, 0.0)
