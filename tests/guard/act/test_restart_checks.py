"""What is asked of an engine after it was started."""

from __future__ import annotations

import pytest

from plimsoll.guard.act.decide import enough_cache, is_ready, kv_tokens, troubles, was_restarted
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.unknown import Condition, Status

ANSWERS = Look(0.0, 0.0, Reach.ANSWERS, health=200)


def gate(*, ready: bool, reason: str) -> GateState:
    return GateState(ready, reason, 0, 0)


@pytest.mark.parametrize(
    ("look", "wanted"),
    [
        (None, False),
        (ANSWERS, True),
        (ANSWERS._replace(health=503), False),
        (ANSWERS._replace(reach=Reach.REFUSED), False),
        (ANSWERS._replace(gate=gate(ready=True, reason="")), True),
        (ANSWERS._replace(gate=gate(ready=False, reason="starting")), False),
        (ANSWERS._replace(gate=gate(ready=False, reason="draining")), True),
    ],
)
def test_ready_is_what_answers_and_would_be_sent_work(look: Look | None, wanted: bool) -> None:
    """By its page, its health and its gate; a drain of guard's own is no want of readiness."""
    assert is_ready(look) is wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, None),
        ({"kv_cache_size_tokens": "32000"}, 32_000.0),
        ({"num_gpu_blocks": "1000", "block_size": "16"}, 16_000.0),
        ({"kv_cache_size_tokens": "none", "num_gpu_blocks": "10", "block_size": "16"}, 160.0),
        ({"num_gpu_blocks": "1e9", "block_size": "16"}, None),
        ({"num_gpu_blocks": "9" * 40, "block_size": "16"}, None),
        ({"num_gpu_blocks": "-5", "block_size": "16"}, None),
    ],
)
def test_the_cache_is_as_large_as_the_engine_says(config: dict[str, str], wanted: float | None) -> None:
    """In tokens, or by blocks; what is no number is not known."""
    assert kv_tokens(ANSWERS._replace(config=config)) == wanted
    assert kv_tokens(None) is None


def test_only_a_cache_below_the_context_holds_it_back() -> None:
    """Less than at the last start is told; not known is no reason."""
    look = ANSWERS._replace(config={"kv_cache_size_tokens": "8000"})
    assert enough_cache(look, 4_000.0, 8_100.0).facts == {"kv_tokens": 8_000.0}
    assert enough_cache(look, 9_000.0, None).is_done is False
    assert enough_cache(look, None, 16_000.0).facts["is_less"] is True
    assert enough_cache(look, 4_000.0, "what?").is_done is True
    assert enough_cache(ANSWERS, 4_000.0, 8_000.0).is_done is True


@pytest.mark.parametrize(
    ("began", "before", "wanted"), [(100.0, 100.0, False), (103.0, 100.0, False), (120.0, 100.0, True), (None, 100.0, False),
                                    (120.0, None, False), (90.0, 100.0, False)],
)  # fmt: skip
def test_an_engine_that_began_later_was_restarted(began: float | None, before: float | None, wanted: bool) -> None:
    """A few seconds are the clock's; what is not known says nothing."""
    assert was_restarted(ANSWERS._replace(started_unix_s=began), before) is wanted
    assert not was_restarted(None, before)


def test_trouble_is_the_same_kind_again_or_one_that_is_worse() -> None:
    """The condition that led to it, a death, a hang, a crash loop; another advice is none."""

    def held(kind: str, status: Status = Status.TRUE) -> dict[str, Condition]:
        return {kind: Condition(kind, status, "Seen", f"it is {kind}", 0.0)}

    for kind in ("exhausted", "dead", "wedged", "hung", "loop"):
        assert troubles("exhausted", held(kind)) == {kind: f"it is {kind}"}
    for conditions in ({}, held("creep"), held("exhausted", Status.UNKNOWN), held("dead", Status.FALSE), held("asked")):
        assert troubles("exhausted", conditions) == {}
    assert troubles("asked", {**held("asked"), **held("loop")}) == {}, "who asks for a start knows of those before it"
    assert troubles("asked", held("dead")) == {"dead": "it is dead"}
