"""The verdict on one flag."""

from __future__ import annotations

import shlex

import pytest

from plimsoll.launch.check_flags import FlagStatus, Item, check
from plimsoll.launch.command_line import ConfigFile, EntryPoint, Launch
from plimsoll.vllm import flag_notes
from plimsoll.vllm.flags import flags_of, history_of
from plimsoll.vllm.versions import engine_named, newest
from tests.each import each


def _item(command: str, name: str, vllm: str = "0.32.0", config: ConfigFile | None = None) -> Item:
    words = tuple(shlex.split(command))
    unresolved = tuple(word[1:] for word in words if word.startswith("$"))
    launch = Launch("test", EntryPoint.SERVE, words, unresolved=unresolved)
    return next(item for item in check(launch, engine_named(vllm), config=config).items if item.name == name)


@pytest.mark.parametrize(
    ("value", "since", "instead"),
    [
        ("32k", "0.8.4", "--max-model-len 32000"),
        ("32K", "0.8.4", "--max-model-len 32768"),
        ("25.6k", "0.8.4", "--max-model-len 25600"),
        ("auto", "0.14.0", "a number of tokens; without the flag it is the model's own length"),
        ("25.6K", None, None),
        ("long", None, None),
    ],
)
def test_a_number_that_only_later_releases_read(value: str, since: str | None, instead: str | None) -> None:
    """0.8.0 takes whole numbers alone: the release that reads more is named, and what to write until then."""
    item = _item(f"m --max-model-len {value}", "--max-model-len", "0.8.0")
    assert (item.status, item.since, item.instead) == (FlagStatus.NEVER_EXISTED, since, instead)
    assert ("no release takes" in (item.note or "")) is (since is None)


def test_auto_between_the_two_releases() -> None:
    """0.10.0 reads 32k and not auto."""
    assert _item("m --max-model-len 32k", "--max-model-len", "0.10.0").status is FlagStatus.OK
    assert _item("m --max-model-len auto", "--max-model-len", "0.10.0").since == "0.14.0"


def test_pairs_are_offered_as_json() -> None:
    """`image=4` of earlier releases has one meaning, and it is shown."""
    item = _item("m --limit-mm-per-prompt image=4", "--limit-mm-per-prompt")
    assert item.instead == """--limit-mm-per-prompt '{"image": 4}'"""
    assert _item("m --limit-mm-per-prompt image=x", "--limit-mm-per-prompt").instead is None


def test_a_setting_of_lora_without_lora_does_nothing() -> None:
    """vLLM builds LoRA's configuration only with --enable-lora; the last of several switches decides."""
    for command in ("m --max-loras 8", "m --enable-lora --no-enable-lora --max-loras 8"):
        item = _item(command, "--max-loras")
        assert item.status is FlagStatus.NO_EFFECT
        assert "--enable-lora" in (item.instead or "")
    assert _item("m --max-loras 8 --enable-lora", "--max-loras").status is FlagStatus.OK


@pytest.mark.parametrize("command", ["m --max-loras 8 $EXTRA", "$MODEL --max-loras 8"])
def test_a_setting_is_not_called_idle_where_flags_may_be_hidden(command: str) -> None:
    """A variable that nobody saw may hold the switch."""
    assert _item(command, "--max-loras").status is FlagStatus.OK


def test_a_file_may_hold_the_switch() -> None:
    """A --config file counts, and one that is not at hand leaves it open."""
    for entries in ({"enable-lora": True}, None):
        config = ConfigFile("c.yaml", entries)
        assert _item("m --config c.yaml --max-loras 8", "--max-loras", config=config).status is FlagStatus.OK
    config = ConfigFile("c.yaml", {"port": 1})
    assert _item("m --config c.yaml --max-loras 8", "--max-loras", config=config).status is FlagStatus.NO_EFFECT


def test_since_when_is_said_only_where_it_is_known() -> None:
    """A need that was read in one release alone is not dated, and not held against earlier ones."""
    item = _item("m --max-log-len 5", "--max-log-len")
    assert (item.status, item.since) == (FlagStatus.NO_EFFECT, None)
    assert _item("m --max-log-len 5", "--max-log-len", "0.25.1").status is FlagStatus.OK
    assert _item("m --max-loras 8", "--max-loras", "0.6.0").since == "0.3.0"


def test_needs_are_about_flags_that_exist() -> None:
    """Both sides of every pair are flags of a release, and the needed one is still there."""
    for name, needs in flag_notes.NEEDS.items():
        assert history_of(name)
        assert needs.flag in flags_of(newest())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("m --tensor-parallel-size 0", "--tensor-parallel-size"),
        ("m -tp=-1", "-tp"),
        ("m --max-num-seqs 0", "--max-num-seqs"),
        ("m --watermark 1", "--watermark"),
        ("m --port 99999", "--port"),
        ("m --port=-1", "--port"),
    ],
)
def test_numbers_that_the_configuration_refuses(command: str, name: str) -> None:
    """The parser takes them and 0.32.0 still does not start."""
    item = _item(command, name)
    assert item.status is FlagStatus.NEVER_EXISTED
    assert "is not at least" in (item.note or "")


def test_a_number_that_is_given_again_is_not_held_against_it() -> None:
    """The parser takes the last of several, and the configuration never sees the others."""
    assert _item("m --max-num-seqs 0 --max-num-seqs 64", "--max-num-seqs").status is FlagStatus.OK


def test_limits_are_not_claimed_for_releases_that_were_not_read() -> None:
    """Only a port's limit holds everywhere; a socket or no server at all makes the port idle, not wrong."""
    assert _item("m --max-num-seqs 0", "--max-num-seqs", "0.25.1").status is FlagStatus.OK
    assert _item("m --port 99999", "--port", "0.6.0").status is FlagStatus.NEVER_EXISTED
    for command in ("m --port 99999 --uds /run/x", "m --port 99999 --headless"):
        assert _item(command, "--port").status is FlagStatus.OK
    for command in ("m --port 0", "m --port 65535", "m --max-num-seqs $N"):
        assert not _item(command, command.split()[1]).status.is_problem


def test_a_quantization_that_vllm_does_not_list_is_doubted_not_refused() -> None:
    """A plugin may register it and some models overrule it, so that nobody can be sure without them."""
    item = _item("m --quantization awq2", "--quantization")
    assert (item.status, item.instead) == (FlagStatus.UNKNOWN, "--quantization awq, if that was meant")
    for vllm, name in (("0.32.0", "awq"), ("0.32.0", "None"), ("99.0.0", "awq2")):
        assert _item(f"m --quantization {name}", "--quantization", vllm).status is FlagStatus.OK


@each(
    ("command", "vllm", "status", "note"),
    [
        ("--reasoning-parser deepseek_r1", "0.9.0", FlagStatus.OK, ""),
        ("--tool-call-parser hermes", "0.10.0", FlagStatus.OK, ""),
        ("--reasoning-parser mine", "0.8.2", FlagStatus.UNKNOWN, "a plugin"),
        ("--tool-call-parser kimi_k2", "0.6.2", FlagStatus.UNKNOWN, "0.10.0 to 0.32.0 have it"),
        ("--tool-call-parser $PARSER", "0.32.0", FlagStatus.OK, ""),
        ("--quantization mine", "0.7.0", FlagStatus.UNKNOWN, "the model's files overrule it"),
        ("--log-config-file f", "0.32.0", FlagStatus.DEPRECATED, "0.33.0 removes it"),
        ("--disable-cascade-attn", "0.32.0", FlagStatus.NO_EFFECT, "0.33.0 removes it"),
    ],
)
def test_open_sets_and_announced_removals(command: str, vllm: str, status: FlagStatus, note: str) -> None:
    """A value that a plugin can register is never called non-existent, and an announced removal is told ahead."""
    item = _item(f"m {command}", command.split()[0], vllm)
    assert item.status is status
    assert note in (item.note or "")


@each(
    ("typed", "words"),
    [
        ("--max-modl-len 4096", ("--max-model-len", "4096")),
        ("--enable-prefx-caching", ("--enable-prefix-caching",)),
        ("--no-enable-prefix-cachin", ("--no-enable-prefix-caching",)),  # a prefix, which argparse takes itself
        ("--max-modl-len many", ()),  # a value that the flag does not take
        ("--enable-prefx-caching 7", ()),
        ("--max-modl-len 4096 --max-model-len 8192", ("--max-model-len", "8192")),  # the command says it itself
        ("--my-own-plugin-flag 3", ()),
    ],
)
def test_a_misspelt_flag_is_corrected_where_one_is_near(typed: str, words: tuple[str, ...]) -> None:
    """The rewritten command has the flag that was meant, a note says so, and what is not sure is left out."""
    checked = check(Launch("test", EntryPoint.SERVE, ("m", *typed.split())), engine_named("0.32.0"))
    assert checked.rewritten == ("vllm", "serve", "m", *words)
    told = any(note.startswith("corrected in the rewritten command: ") for note in checked.notes)
    assert told is (bool(words) and typed.split()[0] not in words and "8192" not in words and "--no-" not in typed)
