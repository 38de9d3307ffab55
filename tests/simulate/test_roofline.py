"""Step times by the data sheet: never negative, never faster for more work."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_named
from plimsoll.simulate.settings import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    OVERHEAD_NS,
    EngineLimits,
    Experts,
    Sheet,
    Speed,
    Work,
    active_parameters,
    graph_sizes,
    roofline,
    sheet_time,
)

WORK = Work(weights_bytes=16e9, active_parameters=8e9, kv_bytes_per_token=131_072)
SPEED = Speed(bandwidth_bytes_per_s=1e12, flops_per_s=1.6e14)
SPARSE = Work(60e9, 3e9, 98_304, Experts(128, 8, 0.95))


@pytest.mark.parametrize("work", [WORK, SPARSE])
@pytest.mark.parametrize("sizes", [(), graph_sizes(128)])
def test_more_tokens_never_take_less(work: Work, sizes: tuple[int, ...]) -> None:
    """The table is above 0 and does not fall."""
    found = roofline(work, SPEED, 2048, sizes)
    table = found.table(2048)
    assert len(table) == 2049
    assert (table > 0).all()
    assert (np.diff(table) >= 0).all()
    assert min(found.base_ns, found.token_ns, found.seq_ns, found.ctx_ps) > 0


def test_small_steps_read_weights_and_large_ones_compute() -> None:
    """By hand at both ends; twice the card is half the time, but for what the engine itself needs."""
    table = roofline(WORK, SPEED, 2048).table(2048)
    assert table[1] == pytest.approx(OVERHEAD_NS + 16e9 / (1e12 * BANDWIDTH_SHARE) * 1e9)
    assert table[2048] == pytest.approx(OVERHEAD_NS + 2 * 8e9 * 2048 / (1.6e14 * COMPUTE_SHARE) * 1e9)
    one = roofline(WORK, SPEED, 512).table(512)
    fast = roofline(WORK, Speed(2e12, 3.2e14), 512)
    two = roofline(WORK._replace(cards=2), SPEED, 512)
    assert np.allclose(fast.table(512), two.table(512))
    assert np.allclose((one - OVERHEAD_NS) / 2, fast.table(512) - OVERHEAD_NS, atol=2)
    assert two.ctx_ps == fast.ctx_ps


def test_few_tokens_read_few_experts() -> None:
    """Many read all of them; a token is computed with the chosen ones alone."""
    experts = Experts(128, 8, 0.95)
    read = experts.read(np.array([0.0, 1.0, 1000.0]))
    assert read[0] == pytest.approx(0.05)
    assert read[1] == pytest.approx(0.05 + 0.95 * 8 / 128)
    assert read[2] == pytest.approx(1.0)
    assert Experts(4, 9, 1.0).hit(np.array([1.0]))[0] == 1.0
    experts = Experts(128, 8, 0.95)
    assert active_parameters(30.0, 29.0, experts) == pytest.approx(1.0 + 29.0 * 8 / 128)
    assert active_parameters(8.0, 0.0, None) == 8.0


@pytest.mark.parametrize(
    ("work", "speed"), [(WORK._replace(weights_bytes=0), SPEED), (WORK, Speed(0, 1e14)), (WORK._replace(cards=0), SPEED)]
)
def test_nothing_cannot_be_timed(work: Work, speed: Speed) -> None:
    """A model or a card without size is the user's mistake, in one line."""
    with pytest.raises(BadInput):
        roofline(work, speed, 16)


def test_eight_bit_floats_have_a_rate_of_their_own() -> None:
    """One byte a parameter; four bits are unpacked and computed with in sixteen."""
    for card, bytes_a_parameter, flops in (
        ("H100", 1.0, "fp8"), ("H100", 2.0, "bf16"), ("H100", 0.55, "bf16"), ("A100 SXM 80GB", 1.0, "bf16"),
    ):  # fmt: skip
        gpu = gpu_named(card)
        found = sheet_time(Sheet(8e9 * bytes_a_parameter, 2e6, 8e9), gpu, EngineLimits())
        assert found is not None
        assert found.token_ns == round(1e9 * 2 * 8e9 / (getattr(gpu, f"{flops}_flops") * COMPUTE_SHARE))
