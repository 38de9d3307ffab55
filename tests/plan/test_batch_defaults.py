"""Batch limits when nobody says."""

from __future__ import annotations

import pytest

from plimsoll.plan.settings import batch_limits, batch_limits_v0
from plimsoll.units import GIB


@pytest.mark.parametrize(
    ("release", "gpu", "gib", "expected"),
    [
        ("0.8.0", "NVIDIA H100 80GB HBM3", 79, (1024, 8192)),
        ("0.8.0", "NVIDIA L4", 22, (1024, 2048)),
        ("0.8.4", "NVIDIA L4", 22, (256, 2048)),
        ("0.8.5", "NVIDIA A100-SXM4-80GB", 79, (1024, 8192)),
        ("0.9.0", "NVIDIA A100-SXM4-80GB", 79, (256, 2048)),
        ("0.19.0", "NVIDIA H100 80GB HBM3", 79, (1024, 8192)),
        ("0.27.1", "NVIDIA B200", 178, (1024, 8192)),
        ("0.28.0", "NVIDIA B200", 178, (1024, 16384)),
        ("0.32.0", "NVIDIA L40S", 44, (256, 2048)),
    ],
)
def test_limits_by_release_and_card(release: str, gpu: str, gib: int, expected: tuple[int, int]) -> None:
    """Each row was read in that release's source."""
    assert batch_limits(release, gpu, gib * GIB) == expected


def test_the_first_engine_had_other_rules() -> None:
    """Before 0.8.0 a batch held the longest prompt unless prompts were chunked."""
    assert batch_limits("0.7.3", "NVIDIA H100", 79 * GIB) is None
    assert batch_limits_v0(32768, chunked=False) == (256, 32768)
    assert batch_limits_v0(1024, chunked=False) == (256, 2048)
    assert batch_limits_v0(131072, chunked=True) == (256, 2048)
