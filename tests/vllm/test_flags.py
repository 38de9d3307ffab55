"""The flag table that was read from the wheels."""

from __future__ import annotations

import pytest

from plimsoll.launch.check_flags import row_problem
from plimsoll.vllm import flag_notes, versions
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, flags_of, history_of, release_after
from plimsoll.vllm.versions import is_before, newest
from tests.each import each


@each(
    ("name", "gone_in"),
    [
        # Each was looked up by hand in the tags of vLLM's repository.
        ("--swap-space", "0.18.0"),
        ("--disable-log-requests", "0.17.0"),
        ("--preemption-mode", "0.11.0"),
        ("--scheduler-delay-factor", "0.11.0"),
        ("--use-v2-block-manager", "0.10.0"),
        ("--num-scheduler-steps", "0.10.1"),
        ("--cuda-graph-sizes", "0.13.0"),
        ("--max-num-partial-prefills", "0.27.0"),
        ("--calculate-kv-scales", "0.28.0"),
        ("--disable-mm-preprocessor-cache", "0.13.0"),
    ],
)
def test_when_a_flag_went(name: str, gone_in: str) -> None:
    """The release that dropped a well-known flag is the one its history says."""
    assert release_after(history_of(name)[-1].last) == gone_in


@each(
    ("name", "since"),
    [
        ("--gpu-memory-utilization", "0.2.3"),
        ("--shutdown-timeout", "0.18.0"),
        ("--attention-backend", "0.13.0"),
        ("--kv-cache-memory-bytes", "0.10.2"),
        ("--watermark", "0.24.0"),
        ("--enable-log-requests", "0.10.1"),
        ("--kv-offloading-size", "0.11.1"),
        ("--max-num-queued-reqs", "0.29.0"),
        ("--max-num-active-seqs", "0.31.0"),
        ("--device-memory-utilization", "0.31.0"),
    ],
)
def test_when_a_living_flag_came(name: str, since: str) -> None:
    """The newest release still has it, and the first that had it is right."""
    assert history_of(name)[0].first == since
    assert name in flags_of(newest())


def test_the_default_everybody_trips_over() -> None:
    """--gpu-memory-utilization went from 0.9 to 0.92 in 0.20.0."""
    assert flags_of("0.19.1")["--gpu-memory-utilization"].default == 0.9
    assert flags_of("0.20.0")["--gpu-memory-utilization"].default == 0.92


def test_flags_have_a_history_without_gaps() -> None:
    """None vanishes and comes back, and few defaults are unknown."""
    releases = list(versions.wheels())
    for name in versions.rows("flags"):
        seen = [release for release in releases if name in flags_of(release)]
        between = releases[releases.index(seen[0]) : releases.index(seen[-1]) + 1]
        assert seen == between, name
    for release in versions.wheels():
        rows = {row.name: row for row in flags_of(release).values()}
        unknown = [name for name, row in rows.items() if row.default is UNKNOWN_DEFAULT]
        assert len(unknown) <= 8, (release, unknown)


@each("name", sorted(flag_notes.GONE))
def test_a_note_about_a_gone_flag_is_about_one_that_is_gone(name: str) -> None:
    """Nothing is said to be gone that never was there, or still is."""
    assert history_of(name)
    assert name not in flags_of(newest())


def test_every_flag_that_goes_has_a_note() -> None:
    """Why and what instead; an announced removal is of one that is still there, marked as deprecated."""
    gone = {name for name in versions.rows("flags") if name not in flags_of(newest())}
    assert gone <= set(flag_notes.GONE)
    for flag, announced in flag_notes.ANNOUNCED.items():
        assert flags_of(newest())[flag].is_deprecated
        assert is_before(newest(), announced.release)


@each("name", sorted(flag_notes.GONE))
def test_what_replaces_a_flag_exists(name: str) -> None:
    """Every flag that a rewrite puts in place is one the newest release has."""
    known = flags_of(newest())
    for word in flag_notes.GONE[name].rewrite:
        if word.startswith("--"):
            flag = word.split(".")[0]
            assert flag in known or "--" + flag.removeprefix("--no-") in known


@each("name", sorted(flag_notes.MEMORY))
def test_memory_notes_are_about_real_flags(name: str) -> None:
    """No note describes a flag that never existed."""
    assert history_of(name)


@pytest.mark.parametrize("name", sorted(flag_notes.FOLKLORE))
def test_folklore_is_in_no_release(name: str) -> None:
    """What we call never-existed is in none of the wheels."""
    assert not history_of(name)


@each("name", sorted(flag_notes.GONE_VARIABLES))
def test_gone_variables_are_gone(name: str) -> None:
    """A variable said to be without effect is named nowhere in the newest release."""
    stretches = versions.rows("environment")[name]
    assert is_before(stretches[-1]["to"], newest())


def test_no_choices_list_is_empty() -> None:
    """A list that is made when vLLM runs is unknown here, never a list of nothing."""
    rows = [(name, row) for name, stretches in versions.rows("flags").items() for row in stretches]
    assert [(name, row["from"]) for name, row in rows if row.get("choices") == []] == []


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
