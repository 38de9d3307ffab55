"""The settings that are looked at."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.tune.space import Candidate, Space, parse_counts, parse_shares, parse_space, value_text


def test_ranges_double_and_keep_their_end_and_values_read_as_they_are_typed() -> None:
    """64..1000 is 64, 128, ... and 1000; 0.9 is not 0.9000000001."""
    assert parse_counts("64..1000", "max_num_seqs") == (64, 128, 256, 512, 1000)
    assert parse_counts("8,2k,4..8", "x") == (4, 8, 2000)
    assert parse_shares("0.9..0.93", "u") == (0.9, 0.91, 0.92, 0.93)
    assert parse_shares("0.9,0.855", "u") == (0.855, 0.9)
    candidate = Candidate(8, 2048, 16, 0.9)
    assert [value_text(candidate, name) for name in candidate._fields] == ["8", "2048", "16", "0.9"]
    assert candidate.differences(candidate._replace(block_size=32)) == ["block_size"]


@pytest.mark.parametrize("text", ["", "0", "-1", "8..4", "a", "1.5", "1..", "9999999999"])
def test_a_wrong_count_is_one_line(text: str) -> None:
    """The name of the flag stands in it."""
    with pytest.raises(BadInput, match="max_num_seqs"):
        parse_counts(text, "max_num_seqs")


@pytest.mark.parametrize("text", ["", "0", "1.1", "nan", "0.9..0.8", "-0.5"])
def test_a_wrong_share_is_one_line(text: str) -> None:
    """A utilisation lies above 0 and at most at 1."""
    with pytest.raises(BadInput, match="gpu_memory_utilization"):
        parse_shares(text, "gpu_memory_utilization")


def test_candidates_are_those_that_vllm_takes_with_the_own_setting_inside() -> None:
    """No step with fewer tokens than requests may run; own values join the axes, in order and once."""
    space = Space((64, 1024), (512, 2048), (16,), (0.9,))
    pairs = [(one.max_num_seqs, one.max_num_batched_tokens) for one in space.candidates]
    assert pairs == [(64, 512), (64, 2048), (1024, 2048)]
    space = Space((8, 32), (512,), (16,), (0.9,)).with_values_of(Candidate(16, 512, 16, 0.92))
    assert space == Space((8, 16, 32), (512,), (16,), (0.9, 0.92))


def test_only_the_four_flags_are_varied() -> None:
    """Another name is a mistake; unnamed flags keep their values."""
    assert parse_space({"max_num_seqs": "8,16"}).max_num_seqs == (8, 16)
    assert parse_space({"max_num_seqs": "8"}).block_size == Space().block_size
    with pytest.raises(BadInput, match="max_model_len"):
        parse_space({"max_model_len": "8"})
