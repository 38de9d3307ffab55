"""The lines that containment writes: each read by its form, and none that somebody merely quotes."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.contained import ContainedLines, read_contained
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.units import GIB
from tests.doctor.contained_logs import ABORTED, ARMED, CANNOT, GAVE_UP, GREW, NUMBERS, STORM, contained, core, prompt
from tests.doctor.log_maker import STARTED, log


def read(*lines: str) -> ContainedLines:
    """What containment says in these lines, with users' text hidden as doctor does."""
    return read_contained(read_timeline(log([*lines])).log.lines)


def test_every_line_of_containment_is_known() -> None:
    """Armed, not armed, contained, aborted, grown, a storm, and both ways to give up."""
    words = (ARMED, "not armed: a KV connector is set", contained(1), ABORTED, GREW, STORM, GAVE_UP, CANNOT)
    found = read(*map(core, words))
    assert [len(part) for part in found] == [1, 1, 1, 1, 1, 1, 2]
    assert found.not_armed[0].text == "a KV connector is set"
    (failure,) = found.contained
    assert (failure.site, failure.tokens, failure.requests, failure.recomputed) == ("forward", 8192, 48, 190_000)
    assert failure.limit_tokens == 4096
    assert (failure.asked, failure.free) == (round(1.95 * GIB), round(1.10 * GIB))
    assert (found.aborted[0].site, found.aborted[0].tokens, found.grown[0].limit_tokens) == ("encoder", 512, 6144)
    assert [is_survived for _, is_survived in found.ends] == [True, True, False, False]


@pytest.mark.parametrize(
    ("numbers", "asked", "free"),
    [(NUMBERS, round(1.95 * GIB), round(1.10 * GIB)), ("(asked for 2.00 GiB)", 2 * GIB, None), ("(1.00 GiB free)", None, GIB),
     ("", None, None)],
)  # fmt: skip
def test_sizes_that_are_not_known_are_left_out(numbers: str, asked: int | None, free: int | None) -> None:
    """A failure without its sizes counts as any other."""
    (failure,) = read(core(contained(1, numbers=numbers))).contained
    assert (failure.asked, failure.free, failure.limit_tokens) == (asked, free, 4096)


def test_a_site_that_nobody_knows_is_unknown() -> None:
    """A word that is none of the sites is not repeated to people."""
    assert read(core(contained(1, site="elsewhere"))).contained[0].site == "unknown"


def test_lines_without_any_prefix_count_where_nobody_is_named() -> None:
    """A log that lost its prefixes is read as one with them."""
    assert len(read("plimsoll: survive: " + contained(1), "plimsoll: survive: " + STORM).contained) == 1


@pytest.mark.parametrize(
    "line",
    [
        prompt(f"plimsoll: survive: {contained(1)}"),
        f"(APIServer pid=1) INFO 11-15 09:18:15 [logger.py:40] plimsoll: survive: {contained(1)}",
        f"(EngineCore pid=2) INFO 11-15 09:18:15 [x.py:1] he said: plimsoll: survive: {contained(1)}",
        f"plimsoll: survive: {contained(1)}",
        f"(EngineCore pid=2) INFO 11-15 09:18:15 [x.py:1]   plimsoll: survive: {contained(1)}",
    ],
    ids=["in a prompt", "by the API server", "quoted", "by nobody", "indented"],
)
def test_what_only_quotes_such_a_line_is_none(line: str) -> None:
    """A request's text may hold anything: only the engine core's own message counts, from its first letter."""
    assert not read(*STARTED, line)


def test_a_prompt_of_several_lines_is_none_either() -> None:
    """vLLM prefixes each line of what it prints: the user's second line stands where a message begins, and is hidden."""
    head = "INFO 11-15 09:18:15 [logger.py:40] "
    assert not read(
        head + "Received request cmpl-1: prompt: 'first", head + f"plimsoll: survive: {contained(1)}", head + "last'"
    )


@pytest.mark.parametrize("text", ["contained failure x: nothing", "contained failure 1", "aborted request", "", "a" * 20_000])
def test_words_in_another_form_say_nothing(text: str) -> None:
    """Half a line, or one of a later release, is not guessed at."""
    assert not read(core(text)).failures


def test_failures_between_two_kept_lines_are_counted() -> None:
    """Of a huge log the middle is thinned: the number in the line tells how many there were, each engine core for itself."""
    assert read(core(contained(1)), core(contained(40))).total == 40
    other = "(EngineCore_DP1 pid=3) "
    assert read(core(contained(7)), core(contained(2), other), core(contained(8)), core(contained(3), other)).total == 4
    assert read(core(contained(9)), core(contained(1))).total == 2, "a new start counts from one"
