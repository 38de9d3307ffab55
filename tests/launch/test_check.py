"""The verdict on a launch."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from plimsoll.launch.check_flags import FlagReport, FlagStatus, Item, check
from plimsoll.launch.command_line import ConfigFile, EntryPoint, Launch, read_command_line
from plimsoll.launch.files import read_launches
from plimsoll.vllm.flag_notes import GONE
from plimsoll.vllm.flags import history_of
from plimsoll.vllm.versions import engine_named
from tests.each import each

ARTICLE = Path(__file__).parents[2] / "examples" / "article-start.sh"


def _check(command: str, vllm: str = "0.32.0", came_from: str | None = None, **environment: str) -> FlagReport:
    words = tuple(shlex.split(command))
    unresolved = tuple(word[1:] for word in words if word.startswith("$"))
    launch = Launch("test", EntryPoint.SERVE, words, tuple(environment.items()), unresolved=unresolved)
    return check(launch, engine_named(vllm), engine_named(came_from) if came_from else None)


def _item(checked: FlagReport, name: str) -> Item:
    return next(item for item in checked.items if item.name == name)


def test_the_articles_start_script() -> None:
    """The script this product starts from: three flags refused, one variable idle, one switch redundant, the rest fine."""
    (launch,) = read_launches(str(ARTICLE))
    checked = check(launch, engine_named("0.32.0"))
    verdicts = {item.name: (item.status.value, item.since) for item in checked.items}
    assert verdicts.pop("--swap-space") == ("removed", "0.18.0")
    assert verdicts.pop("--max-num-on-the-fly-batches") == ("never-existed", None)
    assert verdicts.pop("--disable-log-requests") == ("removed", "0.17.0")
    assert verdicts.pop("VLLM_ATTENTION_BACKEND") == ("no-effect", "0.15.0")
    assert verdicts.pop("python -m vllm.entrypoints.openai.api_server") == ("deprecated", "0.29.0")
    assert verdicts.pop("--enable-chunked-prefill") == ("redundant", "0.8.0")
    assert {status for status, _ in verdicts.values()} == {"ok"}
    assert set(verdicts) == {
        "--model", "--tensor-parallel-size", "--port", "--host", "--gpu-memory-utilization", "--max-model-len",
        "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--dtype", "--trust-remote-code",
        "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF",
    }  # fmt: skip
    attention = _item(checked, "VLLM_ATTENTION_BACKEND")
    assert attention.instead == "--attention-backend"
    assert not checked.starts


def test_the_articles_script_rewritten() -> None:
    """The rewritten command keeps every value, drops what is refused and turns the idle variable into its flag."""
    (launch,) = read_launches(str(ARTICLE))
    checked = check(launch, engine_named("0.32.0"))
    assert " ".join(checked.rewritten) == (
        "vllm serve /data/models/Qwen2-72B-Instruct --tensor-parallel-size 4 --port 8000 --host 0.0.0.0"
        " --gpu-memory-utilization 0.88 --max-model-len 32768 --max-num-seqs 64 --max-num-batched-tokens 24576"
        " --block-size 16 --dtype bfloat16 --trust-remote-code --attention-backend FLASH_ATTN"
    )
    assert dict(checked.rewritten_environment) == {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
    }


def test_the_same_script_in_its_own_time() -> None:
    """With 0.6.0 the swap flag is fine and the variable works; the invented flag never did."""
    (launch,) = read_launches(str(ARTICLE))
    checked = check(launch, engine_named("0.6.0"))
    assert _item(checked, "--swap-space").status is FlagStatus.OK
    assert _item(checked, "VLLM_ATTENTION_BACKEND").status is FlagStatus.OK
    assert [i.name for i in checked.items if i.status.is_problem] == ["--max-num-on-the-fly-batches"]


def test_a_flag_merely_unknown_to_us_is_never_called_wrong() -> None:
    """On a version we have not read, a flag we do not know is unknown, and the command may start."""
    for vllm in ("99.0.0", "0.1.dev5+g1234", "nightly", "0.25.1+acme"):
        checked = _check("m --brand-new-flag 4", vllm)
        assert _item(checked, "--brand-new-flag").status is FlagStatus.UNKNOWN
        assert checked.starts
        assert checked.rewritten[-2:] == ("--brand-new-flag", "4")


def test_a_flag_of_a_later_release_is_refused_with_the_release_that_has_it() -> None:
    """A flag from the future does not exist yet, and the note says when it comes."""
    item = _item(_check("m --max-num-queued-reqs 4", "0.20.0"), "--max-num-queued-reqs")
    assert (item.status, item.since) == (FlagStatus.NEVER_EXISTED, "0.29.0")


def test_a_mistyped_flag_is_offered_its_neighbour() -> None:
    """The nearest real flag is named."""
    item = _item(_check("m --tensor-paralell-size 4"), "--tensor-paralell-size")
    assert item.status is FlagStatus.NEVER_EXISTED
    assert item.instead is not None
    assert item.instead.startswith("--tensor-parallel-size")


def test_an_ambiguous_prefix_is_refused() -> None:
    """argparse refuses it, so do we, naming the rivals."""
    item = _item(_check("m --max-num 4"), "--max-num")
    assert item.status is FlagStatus.NEVER_EXISTED
    assert "--max-num-active-seqs, --max-num-batched-tokens" in (item.note or "")


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("m --max-model-len 25.6K", "--max-model-len", "25.6k"),
        ("m --kv-cache-dtype fp9", "--kv-cache-dtype", "none of"),
        ("m --max-num-seqs many", "--max-num-seqs", "whole number"),
        ("m --gpu-memory-utilization high", "--gpu-memory-utilization", "number"),
        ("m --port", "--port", "needs a value"),
        ("m --enforce-eager=yes", "--enforce-eager", "takes no value"),
    ],
)
def test_a_value_the_parser_refuses(command: str, name: str, words: str) -> None:
    """A value of the wrong kind stops the start as surely as a removed flag, and is left out of the rewrite."""
    checked = _check(command)
    item = _item(checked, name)
    assert item.status is FlagStatus.NEVER_EXISTED
    assert words in (item.note or "")
    assert name not in checked.rewritten


@pytest.mark.parametrize("share", ["90", "0", "-0.5"])
def test_a_share_that_no_release_takes(share: str) -> None:
    """The parser takes any number and the configuration refuses it; it stays in the rewrite, for its default was not meant."""
    checked = _check(f"m --gpu-memory-utilization={share}")
    item = _item(checked, "--gpu-memory-utilization")
    assert item.status is FlagStatus.NEVER_EXISTED
    assert "at most 1" in (item.note or "")
    assert any("for you to set" in note for note in checked.notes)
    assert share in " ".join(checked.rewritten)


def test_a_value_that_was_taken_once() -> None:
    """A choice that an earlier release took is removed, not misspelled, with the release that dropped it."""
    item = _item(_check("m --prefix-caching-hash-algo builtin"), "--prefix-caching-hash-algo")
    assert (item.status, item.since) == (FlagStatus.REMOVED, "0.10.2")
    assert _item(_check("m --prefix-caching-hash-algo builtin", "0.10.0"), "--prefix-caching-hash-algo").status is FlagStatus.OK


def test_values_we_cannot_see_are_not_judged() -> None:
    """A shell variable nobody assigned may hold anything."""
    assert _item(_check("m --max-num-seqs $N"), "--max-num-seqs").status is FlagStatus.OK


def test_the_model_as_a_flag_is_deprecated_with_vllm_serve() -> None:
    """vllm serve wants the model as its first word; the rewrite puts it there."""
    checked = _check("--model m --port 1")
    assert _item(checked, "--model").status is FlagStatus.DEPRECATED
    assert checked.rewritten == ("vllm", "serve", "m", "--port", "1")


def test_a_stray_word_is_refused() -> None:
    """A word that belongs to no flag stops vLLM."""
    assert not _check("m --port 1 stray").starts


def test_a_config_file_with_an_equals_sign_is_never_read() -> None:
    """vLLM opens the file only when it is written as two words; the rewrite does that."""
    checked = _check("m --config=c.yaml")
    assert _item(checked, "--config").status is FlagStatus.NO_EFFECT
    assert checked.rewritten == ("vllm", "serve", "m", "--config", "c.yaml")


def test_flags_in_a_config_file_are_checked_too() -> None:
    """A removed flag hides in the YAML file as well as anywhere; the file's model counts."""
    launch = Launch("test", EntryPoint.SERVE, ("--config", "c.yaml"))
    config = ConfigFile("c.yaml", {"model": "m", "swap-space": 4, "port": 8001})
    checked = check(launch, engine_named("0.32.0"), config=config)
    item = _item(checked, "--swap-space")
    assert item.status is FlagStatus.REMOVED
    assert "from c.yaml" in (item.note or "")
    assert checked.model == "m"


def test_a_config_file_that_is_not_at_hand_is_said() -> None:
    """What could not be read is a note, not a guess."""
    launch = Launch("test", EntryPoint.SERVE, ("m", "--config", "c.yaml"))
    checked = check(launch, engine_named("0.32.0"), config=ConfigFile("c.yaml", None))
    assert any("not at hand" in note for note in checked.notes)


def test_an_upgrade_shows_the_defaults_the_command_leaves_alone() -> None:
    """From 0.19.0 to 0.32.0 the utilisation changes under a command that does not set it, and not under one that does."""
    changed = {i.name: i for i in _check("m", "0.32.0", "0.19.0").items if i.status is FlagStatus.DEFAULT_CHANGED}
    assert "0.9 in 0.19.0, 0.92 in 0.32.0" in (changed["--gpu-memory-utilization"].note or "")
    assert changed["--gpu-memory-utilization"].since == "0.20.0"
    pinned = _check("m --gpu-memory-utilization 0.9", "0.32.0", "0.19.0")
    assert _item(pinned, "--gpu-memory-utilization").status is FlagStatus.OK
    assert any("CUDA graphs" in change.change for change in pinned.changes)


def test_one_kind_of_nothing_for_another_is_no_change() -> None:
    """An empty text that became unset says nothing to anybody; what was empty and now is something is still named."""
    changed = {i.name for i in _check("m", "0.32.0", "0.6.3").items if i.status is FlagStatus.DEFAULT_CHANGED}
    assert not changed & {"--config", "--model-loader-extra-config", "--limit-mm-per-prompt"}
    assert {"--ignore-patterns", "--allowed-origins", "--block-size"} <= changed


def test_switches_in_a_config_file_are_booleans() -> None:
    """`false` in the file is what vLLM makes of it: dropped, so idle where the default is on and harmless where it is off."""
    launch = Launch("test", EntryPoint.SERVE, ("m", "--config", "c.yaml"))
    config = ConfigFile("c.yaml", {"enable-prefix-caching": False, "enforce-eager": False, "trust-remote-code": True})
    checked = check(launch, engine_named("0.32.0"), config=config)
    assert _item(checked, "--enable-prefix-caching").status is FlagStatus.NO_EFFECT
    assert _item(checked, "--enforce-eager").status is FlagStatus.REDUNDANT
    assert _item(checked, "--trust-remote-code").status is FlagStatus.OK
    assert checked.model == "m"


def test_what_must_be_edited_in_the_file_is_said() -> None:
    """A refused flag in the file cannot be rewritten away: the note names it; a model in the file is nothing to scold."""
    launch = Launch("test", EntryPoint.SERVE, ("--config", "c.yaml"))
    config = ConfigFile("c.yaml", {"model": "m", "swap_space": "4"})
    checked = check(launch, engine_named("0.32.0"), config=config)
    assert any("edit c.yaml: swap_space" in note for note in checked.notes)
    assert _item(checked, "--model").status is FlagStatus.OK


def test_the_last_of_several_switches_wins_in_the_rewrite_too() -> None:
    """Defaults first and overrides behind them: the rewrite never switches remote code on that was switched off."""
    assert _check("m --trust-remote-code --no-trust-remote-code").rewritten == ("vllm", "serve", "m")
    assert _check("m --no-enable-prefix-caching --enable-prefix-caching").rewritten == ("vllm", "serve", "m")
    assert _check("m --enforce-eager --no-enforce-eager --enforce-eager").rewritten[-1] == "--enforce-eager"


def test_a_switch_that_took_true_or_false_once() -> None:
    """`--enable-chunked-prefill False` was valid until 0.8.4; today it is --no-enable-chunked-prefill, and says so."""
    for command in ("m --enable-chunked-prefill False", "m --enable-chunked-prefill=False"):
        checked = _check(command)
        item = _item(checked, "--enable-chunked-prefill")
        assert (item.status, item.since, item.instead) == (FlagStatus.REMOVED, "0.8.5", "--no-enable-chunked-prefill")
        assert checked.rewritten == ("vllm", "serve", "m", "--no-enable-chunked-prefill")
        assert _item(_check(command, "0.6.0"), "--enable-chunked-prefill").status is FlagStatus.OK


def test_a_value_that_the_new_flag_does_not_take_is_left_out_and_said() -> None:
    """XFORMERS is no backend any more: a rewritten command with it would be refused."""
    checked = _check("m", VLLM_ATTENTION_BACKEND="XFORMERS")
    assert checked.rewritten == ("vllm", "serve", "m")
    assert any("VLLM_ATTENTION_BACKEND (--attention-backend is not known to take 'XFORMERS')" in one for one in checked.notes)
    assert _check("m", VLLM_ATTENTION_BACKEND="TRITON_ATTN").rewritten[-1] == "TRITON_ATTN"
    assert _check("m", VLLM_ATTENTION_BACKEND="$BACKEND").rewritten[-1] == "$BACKEND"


def test_a_replacement_does_not_overrule_what_the_command_says() -> None:
    """An idle variable or removed flag never beats the flag that took its place."""
    checked = _check("m --attention-backend FLASHINFER", VLLM_ATTENTION_BACKEND="FLASH_ATTN")
    assert checked.rewritten[-2:] == ("--attention-backend", "FLASHINFER")
    assert any("VLLM_ATTENTION_BACKEND (--attention-backend is given)" in note for note in checked.notes)
    ray = _check("m --worker-use-ray --distributed-executor-backend mp")
    assert ray.rewritten[-2:] == ("--distributed-executor-backend", "mp")


def test_a_replacement_goes_into_json_that_is_there() -> None:
    """vLLM forgets the JSON when a dotted key stands beside it, so the key is put into the JSON."""
    checked = _check("""m --hf-overrides '{"a": 1}' --rope-theta 1000000""")
    assert checked.rewritten[-2:] == ("--hf-overrides", '{"a": 1, "rope_theta": 1000000}')


def test_what_the_rewrite_leaves_out_is_said() -> None:
    """No intent is dropped without a word."""
    checked = _check("m --swap-space 8 --max-num-seqs 1k --made-up 3")
    assert any(
        "left out of the rewritten command: --max-num-seqs 1k, --made-up, --swap-space" in note for note in checked.notes
    )


@pytest.mark.parametrize(
    "command",
    [
        "m --limit-mm-per-prompt image=4", "m --kv-transfer-config notjson", "m --port ''", "m --seed None",
        "m --port.x 3", "m --config a.yaml --config b.yaml", "m --config a.json",
    ],
)  # fmt: skip
def test_more_that_the_parser_refuses(command: str) -> None:
    """Values and shapes that argparse or vLLM stops at are refused here too."""
    assert not _check(command).starts


def test_a_value_form_of_earlier_releases_is_removed_not_misspelled() -> None:
    """`--limit-mm-per-prompt image=4` was right until 0.9.2."""
    item = _item(_check("m --limit-mm-per-prompt image=4"), "--limit-mm-per-prompt")
    assert item.status is FlagStatus.REMOVED
    assert _check("m --limit-mm-per-prompt image=4", "0.7.3").starts


def test_prefixes_and_negations_of_removed_flags_are_removed() -> None:
    """--swap 8 was short for --swap-space, and --no-calculate-kv-scales existed as long as its flag."""
    swap = _item(_check("m --swap 8"), "--swap")
    assert (swap.status, swap.since) == (FlagStatus.REMOVED, "0.18.0")
    scales = _item(_check("m --no-calculate-kv-scales"), "--no-calculate-kv-scales")
    assert (scales.status, scales.since) == (FlagStatus.REMOVED, "0.28.0")


def test_a_flag_that_vllm_ignores_has_no_effect() -> None:
    """0.32.0 takes --disable-cascade-attn and says itself that nothing uses it."""
    assert _item(_check("m --disable-cascade-attn"), "--disable-cascade-attn").status is FlagStatus.NO_EFFECT
    assert _item(_check("m --disable-cascade-attn", "0.30.0"), "--disable-cascade-attn").status is not FlagStatus.NO_EFFECT


def test_the_model_as_a_flag_was_refused_once() -> None:
    """Before 0.8.3 `vllm serve --model m` did not start."""
    assert not _check("--model m", "0.8.0").starts


def test_before_there_was_vllm_serve() -> None:
    """A rewrite for 0.5.0 keeps the entry point that release has."""
    assert _check("m --port 1", "0.5.0").rewritten[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")


def test_changed_defaults_of_variables_are_shown_too() -> None:
    """The graph estimate came on by default in 0.20.0 through a variable; the model is never listed as changed."""
    names = {i.name for i in _check("m", "0.32.0", "0.19.0").items if i.status is FlagStatus.DEFAULT_CHANGED}
    assert "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS" in names
    assert "--model" not in {i.name for i in _check("m", "0.32.0", "0.6.0").items}


def test_everything_the_launch_sets_is_kept() -> None:
    """Variables of other programs are not judged, and not lost."""
    checked = _check("m", LMCACHE_CONFIG_FILE="x.yaml", LD_LIBRARY_PATH="/x")
    assert dict(checked.rewritten_environment) == {"LMCACHE_CONFIG_FILE": "x.yaml", "LD_LIBRARY_PATH": "/x"}


def test_a_long_dash_from_a_word_processor_is_explained() -> None:
    """The commonest fault of pasted commands gets its own words."""
    item = next(i for i in _check("m \N{EM DASH}port 1").items if i.name.endswith("port"))
    assert "long dash" in (item.note or "")


def test_a_variable_of_a_plugin_is_unknown_not_wrong() -> None:
    """vLLM warns about it, but a plugin may read it."""
    assert _item(_check("m", VLLM_ACME_MODE="1"), "VLLM_ACME_MODE").status is FlagStatus.UNKNOWN


def test_variables_that_do_not_concern_vllm_are_left_out() -> None:
    """Only what can change the server is listed."""
    assert not [i for i in _check("m", EDITOR="vi", LOG_DIR="/var/log").items if i.name in ("EDITOR", "LOG_DIR")]


@each("name", sorted(GONE))
@each("vllm", ["0.32.0", "0.20.0"])
def test_the_rewrite_of_any_gone_flag_is_taken(name: str, vllm: str) -> None:
    """Whatever removed flag a command holds, the rewritten one has only flags of that release."""
    row = history_of(name)[-1]
    value = "" if not row.takes_value else {"int": "2", "float": "2.5", "json": '{"a": 1}'}.get(row.kind, "x")
    checked = _check(f"m {name} {shlex.quote(value)}" if value else f"m {name}", vllm)
    again = read_command_line(checked.rewritten[2:], vllm)
    assert all(argument.row is not None for argument in again.arguments)
    assert again.model == "m"
