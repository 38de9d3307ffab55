"""The flag table that was read from the wheels."""

from __future__ import annotations

from pathlib import Path

from plimsoll.launch.check_flags import row_problem
from plimsoll.vllm import flag_notes, versions
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, flags_of, history_of, release_after
from plimsoll.vllm.versions import is_before, newest
from tests.each import each, rows

CASES = Path(__file__).parent / "cases.txt"


@each(("name", "gone_in"), rows(CASES, "gone"))
def test_when_a_flag_went(name: str, gone_in: str) -> None:
    """The release that dropped a well-known flag is the one its history says."""
    assert release_after(history_of(name)[-1].last) == gone_in


@each(("name", "since"), rows(CASES, "came"))
def test_when_a_living_flag_came(name: str, since: str) -> None:
    """The newest release still has it, and the first that had it is right."""
    assert history_of(name)[0].first == since
    assert name in flags_of(newest())


def test_flags_have_a_history_without_gaps() -> None:
    """None vanishes and comes back, and few defaults are unknown."""
    releases = list(versions.wheels())
    for name in versions.rows("flags"):
        seen = [release for release in releases if name in flags_of(release)]
        assert seen == releases[releases.index(seen[0]) : releases.index(seen[-1]) + 1], name
    for release in versions.wheels():
        rows = {row.name: row for row in flags_of(release).values()}
        unknown = [name for name, row in rows.items() if row.default is UNKNOWN_DEFAULT]
        assert len(unknown) <= 8, (release, unknown)
        # A list that is made when vLLM runs is unknown here, never a list of nothing.
        assert all(row.choices != () for row in rows.values()), release
    utilization = [flags_of(release)["--gpu-memory-utilization"].default for release in ("0.19.1", "0.20.0")]
    assert utilization == [0.9, 0.92]  # the default that everybody trips over


def test_notes_are_about_flags_as_the_wheels_have_them() -> None:
    """What is called gone was there and is not, what replaces it is, each removal has its note, and folklore never existed."""
    known = flags_of(newest())
    for name, gone in flag_notes.GONE.items():
        assert history_of(name), name
        assert name not in known, name
        flags = [word.split(".")[0] for word in gone.rewrite if word.startswith("--")]
        assert all(flag in known or "--" + flag.removeprefix("--no-") in known for flag in flags), name
    assert {name for name in versions.rows("flags") if name not in known} <= set(flag_notes.GONE)
    for flag, announced in flag_notes.ANNOUNCED.items():
        assert known[flag].is_deprecated, flag
        assert is_before(newest(), announced.release), flag
    assert [name for name in flag_notes.MEMORY if not history_of(name)] == []
    assert [name for name in flag_notes.FOLKLORE if history_of(name)] == []
    for name in flag_notes.GONE_VARIABLES:
        assert is_before(versions.rows("environment")[name][-1]["to"], newest()), name


def test_every_registered_name_is_taken() -> None:
    """No release is said to refuse a parser or a quantisation that its own source registers."""
    refused = []
    for release in versions.releases():
        for flag in ("--tool-call-parser", "--reasoning-parser", "--quantization"):
            row = flags_of(release).get(flag)
            own = flag_notes.own_values(flag, release) if row is not None else ()
            refused += [(release, flag, name) for name in own if row is not None and row_problem(row, name)]
    assert refused == []
    assert len(flag_notes.own_values("--tool-call-parser", "0.32.0")) > 50
