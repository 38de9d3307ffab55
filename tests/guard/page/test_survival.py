"""The card of contained failures on an engine's page."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.contained import LastFailure, Survival
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.guard.page.engine import ARMED, LIMPS, NO_SURVIVAL, OFF, STORM, TOO_OLD, survival_of

LAST = LastFailure(12.0, "logits", 8192.0, 48.0, 2.0 * 2**30, None, "prompt_logprobs")
FOUND = Survival(
    armed=True, contained=3.0, aborted=0.0, recomputed_tokens=190_000.0, stalled_s=1.7, last=LAST, tokens_now=1024.0,
    tokens_start=8192.0, limping=False, storm=False,
)  # fmt: skip


def look(survival: Survival | None) -> Look:
    """A look at an engine whose gate says this."""
    return Look(
        10.0, 1_000.0, Reach.ANSWERS, gate=GateState(ready=True, reason="", in_flight=0, engine_requests=0, survival=survival)
    )


def test_the_card_shows_the_count_the_cost_and_the_newest() -> None:
    """Every figure by its name, and the newest failure with the moment it happened and its shape."""
    card = survival_of(look(FOUND))
    assert card["says"] == ARMED
    assert {one["name"]: one["value"] for one in card["figures"]} == {
        "contained": 3, "aborted": 0, "recomputed_tokens": 190_000, "stalled_s": 1.7, "tokens_now": 1024, "tokens_start": 8192,
    }  # fmt: skip
    assert card["last"]["at"] == 988
    assert "at logits, a request that wants prompt_logprobs (asked for 2.0 GiB)" in card["last"]["says"]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (None, NO_SURVIVAL),
        (Look(1.0, 1.0, Reach.ANSWERS), NO_SURVIVAL),
        (look(None), TOO_OLD),
        (look(Survival(why="PLIMSOLL_SURVIVE is not set")), f"off, {OFF}: PLIMSOLL_SURVIVE is not set"),
        (look(Survival(armed=False, why="a KV connector is set")), f"not armed, {OFF}: a KV connector is set"),
        (look(FOUND._replace(limping=True)), LIMPS),
        (look(FOUND._replace(limping=True, storm=True)), STORM),
    ],
)
def test_the_state_in_a_sentence(seen: Look | None, says: str) -> None:
    """Unknown, off, not armed with its reason, armed, limping, or a storm."""
    assert survival_of(seen)["says"] == says


def test_without_a_failure_there_is_none_to_show() -> None:
    """A server on which containment is off has no figures, and an armed one that never failed no newest."""
    card = survival_of(look(Survival()))
    assert (card["figures"], card["last"]) == ([], None)
    assert survival_of(look(FOUND._replace(contained=0.0)))["last"] is None


def test_a_figure_that_is_not_told_is_unknown() -> None:
    """None, which the page shows as unknown; and what the engine says of its reason is shown like any foreign text."""
    values = {one["name"]: (one["value"], one["why"]) for one in survival_of(look(FOUND._replace(aborted=None)))["figures"]}
    assert values["aborted"] == (None, "unknown")
    shown = survival_of(look(Survival(armed=False, why="x\u202ey\n" + "z" * 900)))["says"]
    assert "\u202e" not in shown
    assert len(shown) <= 300
