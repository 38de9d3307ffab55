"""Candidates as plan sees them."""

from __future__ import annotations

from plimsoll.tune.space import Candidate, candidate_of, launch_of, plan_all, roomiest
from tests.tune.servers import SMALL, server


def test_a_larger_batch_costs_cache() -> None:
    """What the issue of tuning is about: more at once and larger steps leave fewer blocks."""
    given = server()
    small, more, larger = plan_all(
        [Candidate(16, 512, 16, 0.92), Candidate(512, 512, 16, 0.92), Candidate(16, 8192, 16, 0.92)], given.ledger, given.replan
    )
    assert more.kv_tokens < small.kv_tokens
    assert larger.kv_tokens < small.kv_tokens


def test_what_plan_warns_of_or_hangs_on_its_estimate_is_not_safe() -> None:
    """A warning is enough, and its code is the reason; nobody wants a start that only may succeed."""
    given = server()
    (option,) = plan_all([Candidate(64, 2048, 16, 0.99)], given.ledger, given.replan)
    assert not option.is_safe
    assert option.why_not.startswith("startup.free-memory-check")
    given = server("--max-model-len", "18000")
    (option,) = plan_all([candidate_of(given.ledger)], given.ledger, given.replan)
    assert option.ledger.fits
    assert option.findings == ()
    assert not option.is_safe
    assert option.why_not == "one request fits by the estimate, not at its low end"


def test_the_roomiest_of_each_pair_goes_on() -> None:
    """The most of the card that is safe, in the smallest blocks; never one that is not safe."""
    given = server()
    wider = SMALL._replace(gpu_memory_utilization=(0.88, 0.94, 0.99))
    found = roomiest(plan_all(wider.candidates, given.ledger, given.replan))
    assert len(found) == 4 * 3
    assert {one.candidate.gpu_memory_utilization for one in found.values()} == {0.94}
    assert {one.candidate.block_size for one in found.values()} == {16}


def test_the_commands_own_setting() -> None:
    """As vLLM would start it; a block size that it takes by itself is not asked for."""
    given = server()
    own = candidate_of(given.ledger)
    assert own == Candidate(256, 2048, 16, 0.92)
    assert launch_of(own, given.ledger.settings, 16) == given.ledger.settings
    assert launch_of(own._replace(block_size=32), given.ledger.settings, 16).block_size == 32
