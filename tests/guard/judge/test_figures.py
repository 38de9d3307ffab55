"""What one look holds, and what of it is another after a restart."""

from __future__ import annotations

import pytest

from plimsoll.guard.judge.look import Look, Reach, describe_changes


def look(vllm: str = "0.32.0", **config: str) -> Look:
    return Look(0.0, 0.0, Reach.ANSWERS, vllm=vllm, config=config)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("15497", "15501", ""),
        ("15497", "15400", ""),
        ("15497", "15200", "num_gpu_blocks 15497 became 15200"),
        ("None", "15497", "num_gpu_blocks None became 15497"),
        ("nan", "15497", "num_gpu_blocks nan became 15497"),
    ],
)
def test_a_cache_that_is_measured_is_never_quite_the_same(before: str, after: str, said: str) -> None:
    """A few blocks more or less are no change: vLLM measures them anew at each start. More than a hundredth is one."""
    assert describe_changes(look(num_gpu_blocks=before), look(num_gpu_blocks=after)) == said


def test_a_setting_is_the_same_or_it_is_not() -> None:
    """Of what somebody sets, and of the version, any difference is told."""
    before, after = look(gpu_memory_utilization="0.92", block_size="16"), look("0.32.1", gpu_memory_utilization="0.921")
    assert describe_changes(before, after) == "vLLM 0.32.0 became 0.32.1; gpu_memory_utilization 0.92 became 0.921"
