"""The figures around one failure, and the values computed from them."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.facts import (
    FailureCase,
    PlanFigures,
    gib,
    lower_utilization,
    more_room,
    request_clause,
    setting,
    smaller_cache,
    unique,
)
from plimsoll.doctor.rules.root_cause import OomFigures
from plimsoll.findings import Code, Remedy
from plimsoll.plan.findings import Advice
from plimsoll.units import GIB, MIB
from plimsoll.vllm.log_lines import Measured
from plimsoll.vllm.versions import Behaviour
from tests.doctor.case_maker import case_of

ADVICE = Advice("--max-model-len", "8192", "fits", "leaves 2 GiB", Code.STARTUP_CONTEXT_TOO_LONG)
PLAN = PlanFigures(15 * GIB, 50 * GIB, GIB, 80 * GIB, 72 * GIB, 128_256, (ADVICE,))


def _case(**known: object) -> FailureCase:
    return case_of(Code.RUNTIME_FORWARD, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "share"),
    [("0.9.1", 0.9), ("0.19.1", 0.9), ("0.20.0", 0.92), ("0.32.0", 0.92), ("nonsense", None), (None, None)],
)
def test_the_share_of_the_card_by_default(version: str | None, share: float | None) -> None:
    """0.9 up to 0.19, 0.92 since; unknown where the version is."""
    assert _case(version=version).utilization == share


@pytest.mark.parametrize(
    ("given", "measured", "share"),
    [("0.85", 0.5, 0.85), ("nan", 0.5, None), ("nonsense", None, None), ("7", None, None), (None, 0.5, 0.5)],
)
def test_the_share_that_was_given_rules(given: str | None, measured: float | None, share: float | None) -> None:
    """What was asked for first, then what the log says; nonsense is unknown."""
    flags = {"gpu_memory_utilization": given} if given is not None else {}
    assert _case(flags=flags, measured=Measured(utilization=measured)).utilization == share


@pytest.mark.parametrize(
    ("value", "number"), [("64", 64), ("0x40", None), ("²", None), ("-1", None), ("", None), ("9" * 40, None), ("1e9", None)]
)
def test_a_flags_number_is_a_plain_one(value: str, number: int | None) -> None:
    """Only digits count, and not endless ones."""
    assert _case(flags={"max_num_seqs": value}).number("max_num_seqs") == number


def test_the_cards_size_is_taken_from_whoever_states_it() -> None:
    """Torch's message first, then the log, then the plan."""
    assert _case().total is None
    assert _case(plan=PLAN).total == 80 * GIB
    assert _case(plan=PLAN, measured=Measured(total_bytes=79 * GIB)).total == 79 * GIB
    assert _case(plan=PLAN, measured=Measured(total_bytes=79 * GIB), oom=OomFigures(total=78 * GIB)).total == 78 * GIB


def test_limits_come_from_flags_or_from_the_log() -> None:
    """As given, or as the log says."""
    measured = Measured(max_num_seqs=256, max_num_batched_tokens=8192, tensor_parallel=4)
    case = _case(measured=measured, flags={"max_num_seqs": "64"})
    assert (case.max_num_seqs, case.max_num_batched_tokens, case.parallel) == (64, 8192, 4)
    assert _case().parallel == 1


@pytest.mark.parametrize(
    ("tried", "free", "missing"), [(2 * GIB, GIB, GIB), (GIB, 2 * GIB, 0), (None, GIB, None), (GIB, None, None)]
)
def test_what_was_missing(tried: int | None, free: int | None, missing: int | None) -> None:
    """Never less than nothing, and unknown where the message does not say."""
    assert _case(oom=OomFigures(tried, 80 * GIB, free)).missing == missing


@pytest.mark.parametrize(
    ("version", "since"), [("0.20.0", True), ("0.21.1", True), ("0.19.1", False), (None, None), ("dev", None)]
)
def test_a_behaviour_of_the_release(version: str | None, since: bool | None) -> None:
    """Yes, no, or not known."""
    assert _case(version=version).has(Behaviour.GRAPH_ESTIMATE) is since


def test_the_plans_offers_are_taken_with_their_effect() -> None:
    """Only those flags that were asked for."""
    assert _case(plan=PLAN).planned("--max-model-len") == [
        Remedy("--max-model-len 8192", "fits: leaves 2 GiB", "--max-model-len", "8192")
    ]
    assert _case(plan=PLAN).planned("--max-num-seqs") == []
    assert _case().planned("--max-model-len") == []


@pytest.mark.parametrize(
    ("total", "share", "by", "lower"),
    [
        (80 * GIB, "0.9", 2 * GIB, "0.87"),
        (80 * GIB, "0.95", 100 * MIB, "0.94"),
        (24 * GIB, "0.9", 30 * GIB, None),
        (None, "0.9", GIB, None),
        (0, "0.9", GIB, None),
    ],
)
def test_a_lower_share_leaves_what_was_missing_and_a_margin(total: int | None, share: str, by: int, lower: str | None) -> None:
    """Rounded down to hundredths; none where it would leave no cache, or the card is unknown."""
    case = _case(flags={"gpu_memory_utilization": share}, measured=Measured(total_bytes=total))
    assert lower_utilization(case, by) == lower


def test_a_cache_set_by_hand_is_lowered_by_hand() -> None:
    """`--kv-cache-memory-bytes` overrules the utilisation, so only it helps."""
    known = {"measured": Measured(total_bytes=80 * GIB), "version": "0.25.1"}
    by_hand = more_room(_case(flags={"kv_cache_memory_bytes": str(10 * GIB)}, **known), GIB)
    fits = 10 * GIB - GIB - GIB // 4
    assert (by_hand.flag, by_hand.value) == ("--kv-cache-memory-bytes", str(fits))
    assert by_hand.do == f"--kv-cache-memory-bytes {fits}, not {10 * GIB}"
    by_share = more_room(_case(**known), GIB)
    assert (by_share.flag, by_share.value) == ("--gpu-memory-utilization", "0.90")
    unknown = more_room(_case(), GIB)
    assert (unknown.flag, unknown.value) == ("--gpu-memory-utilization", None)


@pytest.mark.parametrize("fits", [-GIB, 0, 200 * MIB, 10 * GIB, 11 * GIB])
def test_a_cache_of_hardly_anything_is_not_offered(fits: int) -> None:
    """Nor one that is no smaller: then the flag is named, with the size that was too large."""
    offer = smaller_cache(10 * GIB, fits, "why")
    assert (offer.value, offer.do) == (None, f"a smaller --kv-cache-memory-bytes than {10 * GIB}")


def test_words_for_sizes() -> None:
    """What is not known is said to be unknown."""
    assert gib(None) == "an unknown amount"
    assert gib(3 * GIB) == "3.0 GiB"
    assert request_clause(_case()) == "the driver refused an allocation and does not say how large"
    oom = OomFigures(2 * GIB, 80 * GIB, GIB, reserved_unallocated=3 * GIB)
    assert (
        request_clause(_case(oom=oom))
        == "torch asked for 2.0 GiB, 1.0 GiB of 80.0 GiB were free, 3.0 GiB more were held by torch itself in gaps"
    )


def test_one_offer_for_each_flag() -> None:
    """The first stays; offers without a value are told apart by what they say."""
    first, second = setting("--max-num-seqs", 64, "a"), setting("--max-num-seqs", 32, "b")
    words = Remedy("a lower --max-num-seqs", "c", "--max-num-seqs")
    assert unique([first, second, words, words]) == [first, words]
