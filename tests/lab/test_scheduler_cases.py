"""The random cases for the comparison of schedulers are fair: they end, and a real server could meet them."""

from __future__ import annotations

import math
import random
from collections import Counter

from lab.engine.scheduler_cases import Case, blocks_alone, random_case

CASES = 400


def cases() -> list[Case]:
    """The same ones in every run."""
    dice = random.Random(20)
    return [random_case(dice) for _ in range(CASES)]


def test_a_case_is_a_trace_that_ends_on_a_server_as_one_is_set_up() -> None:
    """A seed gives the same cases, arrivals are in order, every admitted request fits alone, and states are aligned to blocks
    exactly with prefix caching, which needs chunks."""
    assert cases() == cases()
    for case in cases():
        settings, arrivals = case.settings, [asked.arrival_ns for asked in case.requests]
        assert arrivals[0] == 0
        assert arrivals == sorted(arrivals)
        for asked in case.requests:
            assert min(asked.prompt, asked.output) >= 1
            assert len(asked.ids) in (0, -(-asked.prompt // case.prefix_block))
        assert case.trace().size == len(case.requests)
        lengths = (asked.prompt + asked.output for asked in case.requests)
        longest = max((length for length in lengths if length <= settings.max_model_len), default=0)
        if settings.groups:
            assert blocks_alone(settings, longest) <= settings.num_blocks - 1
        if not settings.chunked_prefill:
            assert settings.max_num_batched_tokens >= longest
        assert settings.max_num_batched_tokens >= settings.max_num_seqs
        if states := {group.block_size for group in settings.groups if group.kind == "mamba"}:
            assert settings.chunked_prefill or not settings.prefix_caching
            assert states == {settings.block_size if settings.prefix_caching else settings.max_model_len}
        kept = [group.block_size for group in settings.groups if group.kind != "mamba"]
        assert not kept or math.lcm(*kept) == max(kept)


def test_every_kind_is_drawn() -> None:
    """Policies, batches in flight, switches and groups all occur, none of them only now and then."""
    seen: Counter[str] = Counter()
    for case in cases():
        settings = case.settings
        seen[settings.policy] += 1
        seen["async" if settings.async_scheduling else "sync"] += 1
        seen["+".join(sorted({group.kind for group in settings.groups})) or "one full"] += 1
        for name in ("prefix_caching", "chunked_prefill", "reserve_full_isl"):
            seen[f"no {name}"] += not getattr(settings, name)
        for name in ("watermark", "long_prefill_token_threshold"):
            seen[name] += getattr(settings, name) > 0
        seen["shared"] += any(asked.ids for asked in case.requests)
    for kind in ("one full", "sliding", "full+sliding", "full+mamba", "full+mamba+sliding"):
        assert seen[kind] >= 3, (kind, seen)
    for switch in ("priority", "async", "sync", "no prefix_caching", "no chunked_prefill", "no reserve_full_isl", "watermark"):
        assert seen[switch] >= CASES // 12, (switch, seen)
    assert seen["long_prefill_token_threshold"] >= CASES // 12
    assert seen["shared"] >= CASES // 2
