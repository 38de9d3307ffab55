"""The settings that are looked at, what plan says of each, and the combinations of a sweep."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.tune.grid import combinations, parse_axes, plain_points, planned_points
from plimsoll.tune.space import (
    Candidate,
    Space,
    candidate_of,
    launch_of,
    parse_counts,
    parse_shares,
    parse_space,
    plan_all,
    roomiest,
    value_text,
)
from tests.tune.servers import SMALL, server


def test_ranges_double_and_keep_their_end_and_values_read_as_they_are_typed() -> None:
    """64..1000 is 64, 128, ... and 1000; 0.9 is not 0.9000000001."""
    assert parse_counts("64..1000", "max_num_seqs") == (64, 128, 256, 512, 1000)
    assert parse_counts("8,2k,4..8", "x") == (4, 8, 2000)
    assert parse_shares("0.9..0.93", "u") == (0.9, 0.91, 0.92, 0.93)
    assert parse_shares("0.9,0.855", "u") == (0.855, 0.9)
    candidate = Candidate(8, 2048, 16, 0.9)
    assert [value_text(getattr(candidate, name)) for name in candidate._fields] == ["8", "2048", "16", "0.9"]
    assert candidate.differences(candidate._replace(block_size=32)) == ["block_size"]


def test_a_wrong_count_or_share_is_one_line() -> None:
    """The name of the flag stands in it; a utilisation lies above 0 and at most at 1."""
    for text in ("", "0", "-1", "8..4", "a", "1.5", "1..", "9999999999"):
        with pytest.raises(BadInput, match="max_num_seqs"):
            parse_counts(text, "max_num_seqs")
    for text in ("", "0", "1.1", "nan", "0.9..0.8", "-0.5"):
        with pytest.raises(BadInput, match="gpu_memory_utilization"):
            parse_shares(text, "gpu_memory_utilization")


def test_candidates_are_those_that_vllm_takes_with_the_own_setting_inside() -> None:
    """No step with fewer tokens than requests may run; own values join the axes, in order and once."""
    space = Space((64, 1024), (512, 2048), (16,), (0.9,))
    pairs = [(one.max_num_seqs, one.max_num_batched_tokens) for one in space.candidates]
    assert pairs == [(64, 512), (64, 2048), (1024, 2048)]


def test_only_the_four_flags_are_varied() -> None:
    """Another name is a mistake; unnamed flags keep their values."""
    assert parse_space({"max_num_seqs": "8,16"}).max_num_seqs == (8, 16)
    assert parse_space({"max_num_seqs": "8"}).block_size == Space().block_size
    with pytest.raises(BadInput, match="max_model_len"):
        parse_space({"max_model_len": "8"})


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


def test_every_combination_once_and_a_wrong_axis_is_one_line() -> None:
    """In order, the last name fastest. Nothing varied, an unknown name, a wrong value, too many combinations are refused."""
    axes = parse_axes({"max_num_seqs": "8,16", "prefix_caching": "on,off"})
    assert [tuple(point.values()) for point in combinations(axes)] == [(8, True), (8, False), (16, True), (16, False)]
    many = ",".join(map(str, range(2, 999)))
    for words in ({}, {"speed": "1"}, {"prefix_caching": "yes"}, {"watermark": "a"}, {"speedup": "0"}, {"num_blocks": "0"},
                  {"num_blocks": many, "block_size": many}):  # fmt: skip
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
