"""The rewritten command keeps what was meant."""

from __future__ import annotations

import shlex

import pytest

from plimsoll.launch.check_flags import FlagReport, check
from plimsoll.launch.command_line import ConfigFile, EntryPoint, Launch
from plimsoll.vllm.versions import engine_named


def _check(command: str, vllm: str = "0.32.0", config: ConfigFile | None = None) -> FlagReport:
    return check(Launch("test", EntryPoint.SERVE, tuple(shlex.split(command))), engine_named(vllm), config=config)


def _flags(command: str, vllm: str = "0.32.0") -> list[str]:
    """The rewritten command behind the model."""
    return list(_check(command, vllm).rewritten[3:])


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("m --no-enable-prefix-caching --enable-prefix-caching=false", ["--no-enable-prefix-caching"]),
        ("m --enable-prefix-caching=false", ["--no-enable-prefix-caching"]),
        ("m --enable-prefix-caching False", ["--no-enable-prefix-caching"]),
        ("m --enforce-eager true --port 1", ["--enforce-eager", "--port", "1"]),
        ("m --no-enable-prefix-caching --enable-prefix-caching=banana", ["--no-enable-prefix-caching"]),
        ("m --enable-prefix-caching=banana --no-enable-prefix-caching", ["--no-enable-prefix-caching"]),
        ("m --enable-prefix-caching=false --enable-prefix-caching", []),
    ],
)
def test_a_switch_that_is_spelled_wrong_is_not_turned_round(command: str, flags: list[str]) -> None:
    """What says off stays off: the last switch that can be understood wins, and a refused one never takes a good one along."""
    assert not _check(command).starts
    assert _flags(command) == flags


def test_a_refused_switch_that_nobody_understands_is_said() -> None:
    """It is left out with a word, also where it is not the last of its kind."""
    for command in (
        "m --enable-prefix-caching=banana --no-enable-prefix-caching",
        "m --no-enable-prefix-caching --enable-prefix-caching=banana",
    ):
        assert "left out of the rewritten command: --enable-prefix-caching banana" in _check(command).notes


def test_a_redundant_switch_stays_where_a_file_says_otherwise() -> None:
    """The file is still read: without the switch on the command line it would have the last word."""
    config = ConfigFile("c.yaml", {"no-enable-prefix-caching": True})
    checked = _check("m --config c.yaml --enable-prefix-caching", config=config)
    assert checked.rewritten[-1] == "--enable-prefix-caching"


@pytest.mark.parametrize(
    ("command", "vllm", "flags"),
    [
        ("m --max-model-len 32k", "0.8.0", ["--max-model-len", "32000"]),
        ("m --max-model-len=32K", "0.8.0", ["--max-model-len", "32768"]),
        ("m --max-model-len auto", "0.8.0", []),
        ("m --limit-mm-per-prompt image=4", "0.32.0", ["--limit-mm-per-prompt", '{"image": 4}']),
        ("m --limit-mm-per-prompt Image=4,video=1", "0.32.0", ["--limit-mm-per-prompt", '{"image": 4, "video": 1}']),
        ("m --limit-mm-per-prompt image=many", "0.32.0", []),
    ],
)
def test_a_value_in_the_form_of_another_release(command: str, vllm: str, flags: list[str]) -> None:
    """The value stays, written as the release takes it; what has no such form is left out."""
    assert not _check(command, vllm).starts
    assert _flags(command, vllm) == flags


def test_numbers_that_do_not_start_stay_for_the_user_to_set() -> None:
    """Without them vLLM would take its defaults, which nobody meant."""
    checked = _check("m --tensor-parallel-size 0 --port 99999")
    assert checked.rewritten[3:] == ("--tensor-parallel-size", "0", "--port", "99999")
    assert "still in the rewritten command, and for you to set: --tensor-parallel-size 0, --port 99999" in checked.notes


def test_what_does_nothing_is_left_out_and_said() -> None:
    """A number without effect is not taken for one in another release's form."""
    checked = _check("m --max-loras 8")
    assert checked.rewritten == ("vllm", "serve", "m")
    assert "left out of the rewritten command: --max-loras 8" in checked.notes
