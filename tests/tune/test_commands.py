"""The command with a chosen setting in it."""

from __future__ import annotations

from plimsoll.tune.answer import flags_of, with_flags
from plimsoll.tune.space import Candidate


def test_only_what_differs_is_said() -> None:
    """The others stay as they were, typed or not."""
    own = Candidate(256, 2048, 16, 0.92)
    assert flags_of(own, own) == {}
    assert flags_of(Candidate(32, 2048, 16, 0.9), own) == {"--max-num-seqs": "32", "--gpu-memory-utilization": "0.9"}


def test_old_values_go_however_they_were_written() -> None:
    """With a blank, with =, with underscores; other words are not touched."""
    words = ["vllm", "serve", "M", "--max-num-seqs", "8", "--port=80", "--max_num_batched_tokens=512", "--block-size=16"]
    found = with_flags(words, {"--max-num-seqs": "32", "--max-num-batched-tokens": "1024"})
    assert found == [
        "vllm",
        "serve",
        "M",
        "--port=80",
        "--block-size=16",
        "--max-num-seqs",
        "32",
        "--max-num-batched-tokens",
        "1024",
    ]
