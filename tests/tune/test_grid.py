"""A sweep's combinations and what each means."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.tune.grid import parse_axes, plain_points, planned_points
from tests.tune.servers import server


def test_every_combination_once() -> None:
    """In order, the last name fastest."""
    axes = parse_axes({"max_num_seqs": "8,16", "prefix_caching": "on,off"})
    assert [tuple(point.values()) for point in axes.points] == [(8, True), (8, False), (16, True), (16, False)]


MANY = ",".join(map(str, range(2, 999)))


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"speed": "1"},
        {"prefix_caching": "yes"},
        {"watermark": "a"},
        {"speedup": "0"},
        {"num_blocks": "0"},
        {"num_blocks": MANY, "block_size": MANY},
    ],
    ids=" ".join,
)
def test_a_wrong_axis_is_one_line(words: dict[str, str]) -> None:
    """Nothing varied, an unknown name, a wrong value, too many combinations."""
    with pytest.raises(BadInput):
        parse_axes(words)


def test_a_cache_keeps_its_size_when_its_blocks_change() -> None:
    """Unless the number of blocks is varied, too."""
    base = EngineLimits(num_blocks=1025)
    points = plain_points(parse_axes({"block_size": "8,32"}), base, StepTime(), 1.0)
    assert [point.job.settings.num_blocks for point in points if point.job] == [2049, 513]
    both = plain_points(parse_axes({"block_size": "8", "num_blocks": "99"}), base, StepTime(), 1.0)
    assert both[0].job is not None
    assert (both[0].job.settings.block_size, both[0].job.settings.num_blocks) == (8, 99)


def test_speed_switches_and_thresholds() -> None:
    """0 is a threshold: off. A speed belongs to the traffic, not to the engine."""
    words = {"long_prefill_token_threshold": "0,512", "speedup": "2", "async_scheduling": "on", "watermark": "0.1"}
    points = plain_points(parse_axes(words), EngineLimits(), StepTime(), 1.0)
    assert [point.job.settings.long_prefill_token_threshold for point in points if point.job] == [0, 512]
    assert {point.speedup for point in points} == {2.0}
    assert all(point.job.settings.async_scheduling and point.job.settings.watermark == 0.1 for point in points if point.job)


def test_what_vllm_would_not_start_with_is_a_problem_of_that_point() -> None:
    """The others are still replayed."""
    points = plain_points(
        parse_axes({"max_num_batched_tokens": "64,2048", "max_num_seqs": "256"}), EngineLimits(), StepTime(), 1.0
    )
    assert [point.job is None for point in points] == [True, False]
    assert points[0].problem


def test_with_a_command_memory_is_planned_for_each() -> None:
    """More of the card is a larger cache; what plan warns of says so; the number of blocks is plan's."""
    axes = parse_axes({"gpu_memory_utilization": "0.9,0.94,0.99", "max_model_len": "4096,8192"})
    points = planned_points(axes, server(), 1.0, None)
    blocks = {point.values["gpu_memory_utilization"]: point.job.settings.num_blocks for point in points if point.job}
    assert blocks[0.9] < blocks[0.94] < blocks[0.99]
    assert [point.option.is_safe for point in points if point.option] == [True] * 4 + [False] * 2
    assert {point.job.settings.max_model_len for point in points if point.job} == {4096, 8192}
    with pytest.raises(BadInput, match="num_blocks"):
        planned_points(parse_axes({"num_blocks": "100"}), server(), 1.0, None)
    with pytest.raises(BadInput, match="gpu_memory_utilization"):
        plain_points(parse_axes({"gpu_memory_utilization": "0.9"}), EngineLimits(), StepTime(), 1.0)
