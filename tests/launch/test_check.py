"""The verdict on a launch."""

from __future__ import annotations

import shlex
from pathlib import Path

from plimsoll.launch.check_flags import FlagReport, FlagStatus, Item, check
from plimsoll.launch.command_line import ConfigFile, EntryPoint, Launch, read_command_line
from plimsoll.launch.files import read_launches
from plimsoll.vllm.flag_notes import GONE, NEEDS
from plimsoll.vllm.flags import flags_of, history_of
from plimsoll.vllm.versions import engine_named, newest
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


XFORMERS, FLASH = {"VLLM_ATTENTION_BACKEND": "XFORMERS"}, {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}
NEVER, REMOVED, OK, IDLE = FlagStatus.NEVER_EXISTED, FlagStatus.REMOVED, FlagStatus.OK, FlagStatus.NO_EFFECT


@each(
    ("command", "vllm", "status", "since", "words"),
    [
        ("m --max-num-queued-reqs 4", "0.20.0", NEVER, "0.29.0", ""),  # of a later release, which is named
        ("m --max-num 4", "0.32.0", NEVER, None, "--max-num-active-seqs, --max-num-batched-tokens"),  # a prefix of several
        ("m --max-model-len 25.6K", "0.32.0", NEVER, None, "25.6k"),
        ("m --kv-cache-dtype fp9", "0.32.0", NEVER, None, "none of"),
        ("m --max-num-seqs many", "0.32.0", NEVER, None, "whole number"),
        ("m --gpu-memory-utilization high", "0.32.0", NEVER, None, "number"),
        ("m --port", "0.32.0", NEVER, None, "needs a value"),
        ("m --enforce-eager=yes", "0.32.0", NEVER, None, "takes no value"),
        ("m --gpu-memory-utilization=90", "0.32.0", NEVER, None, "at most 1"),
        ("m --gpu-memory-utilization=0", "0.32.0", NEVER, None, "at most 1"),
        ("m --gpu-memory-utilization=-0.5", "0.32.0", NEVER, None, "at most 1"),
        ("m --prefix-caching-hash-algo builtin", "0.32.0", REMOVED, "0.10.2", ""),  # a choice that was taken once
        ("m --prefix-caching-hash-algo builtin", "0.10.0", OK, None, ""),
        ("m --max-num-seqs $N", "0.32.0", OK, None, ""),  # what nobody can see is not judged
        ("--model m --port 1", "0.32.0", FlagStatus.DEPRECATED, None, ""),
        ("m --config=c.yaml", "0.32.0", IDLE, None, ""),  # vLLM opens the file only when it is written as two words
        ("m --enable-chunked-prefill False", "0.32.0", REMOVED, "0.8.5", ""),  # until 0.8.4 it took a value
        ("m --enable-chunked-prefill=False", "0.32.0", REMOVED, "0.8.5", ""),
        ("m --enable-chunked-prefill False", "0.6.0", OK, None, ""),
        ("m --limit-mm-per-prompt image=4", "0.32.0", REMOVED, None, ""),  # right until 0.9.2, not misspelled
        ("m --swap 8", "0.32.0", REMOVED, "0.18.0", ""),  # short for --swap-space
        ("m --no-calculate-kv-scales", "0.32.0", REMOVED, "0.28.0", ""),
        ("m --disable-cascade-attn", "0.32.0", IDLE, None, ""),  # vLLM says itself that nothing uses it
        ("m --disable-cascade-attn", "0.30.0", FlagStatus.REDUNDANT, None, ""),
        ("m \N{EM DASH}port 1", "0.32.0", NEVER, None, "long dash"),
        ("m --max-model-len 32k", "0.10.0", OK, None, ""),
        ("m --max-model-len auto", "0.10.0", NEVER, "0.14.0", ""),
        # vLLM builds LoRA's configuration only with --enable-lora, which a variable that nobody saw may hold.
        ("m --max-loras 8", "0.32.0", IDLE, None, ""),
        ("m --max-loras 8 --enable-lora --no-enable-lora", "0.32.0", IDLE, None, ""),
        ("m --max-loras 8 --enable-lora", "0.32.0", OK, None, ""),
        ("m --max-loras 8 $EXTRA", "0.32.0", OK, None, ""),
        ("$MODEL --max-loras 8", "0.32.0", OK, None, ""),
        ("m --max-loras 8", "0.6.0", IDLE, "0.3.0", ""),
        ("m --max-log-len 5", "0.32.0", IDLE, None, ""),  # a need that was read in one release alone
        ("m --max-log-len 5", "0.25.1", OK, None, ""),
        # Numbers that the parser takes and the configuration refuses; of releases that were not read nothing is claimed.
        ("m --tensor-parallel-size 0", "0.32.0", NEVER, None, "is not at least"),
        ("m -tp=-1", "0.32.0", NEVER, None, "is not at least"),
        ("m --max-num-seqs 0", "0.32.0", NEVER, None, "is not at least"),
        ("m --watermark 1", "0.32.0", NEVER, None, "is not at least"),
        ("m --port 99999", "0.32.0", NEVER, None, "is not at least"),
        ("m --port=-1", "0.32.0", NEVER, None, "is not at least"),
        ("m --max-num-seqs 0 --max-num-seqs 64", "0.32.0", OK, None, ""),  # the configuration never sees the first
        ("m --max-num-seqs 0", "0.25.1", OK, None, ""),
        ("m --port 99999", "0.6.0", NEVER, None, ""),
        ("m --port 99999 --uds /run/x", "0.32.0", OK, None, ""),  # idle, not wrong
        ("m --port 99999 --headless", "0.32.0", OK, None, ""),
        # Values that a plugin can register are never called non-existent; announced removals are told ahead.
        ("m --quantization awq2", "0.32.0", FlagStatus.UNKNOWN, None, ""),
        ("m --quantization awq", "0.32.0", OK, None, ""),
        ("m --quantization None", "0.32.0", OK, None, ""),
        ("m --quantization awq2", "99.0.0", OK, None, ""),
        ("m --reasoning-parser deepseek_r1", "0.9.0", OK, None, ""),
        ("m --tool-call-parser hermes", "0.10.0", OK, None, ""),
        ("m --reasoning-parser mine", "0.8.2", FlagStatus.UNKNOWN, None, "a plugin"),
        ("m --tool-call-parser kimi_k2", "0.6.2", FlagStatus.UNKNOWN, None, "0.10.0 to 0.32.0 have it"),
        ("m --tool-call-parser $PARSER", "0.32.0", OK, None, ""),
        ("m --quantization mine", "0.7.0", FlagStatus.UNKNOWN, None, "the model's files overrule it"),
        ("m --log-config-file f", "0.32.0", FlagStatus.DEPRECATED, None, "0.33.0 removes it"),
        ("m --disable-cascade-attn", "0.32.0", IDLE, None, "0.33.0 removes it"),
    ],
)
def test_the_verdict_on_a_flag(command: str, vllm: str, status: FlagStatus, since: str | None, words: str) -> None:
    """Each flag of a command has its status, the release that decides it, and the words that explain it."""
    checked = _check(command, vllm)
    item = next(item for item in checked.items if item.name[0] in "-\N{EM DASH}" and item.name in command)
    assert item.status is status
    if since is not None:
        assert item.since == since
    assert words in (item.note or "")


def test_a_mistyped_flag_is_offered_its_neighbour() -> None:
    """The nearest real flag is named."""
    item = _item(_check("m --tensor-paralell-size 4"), "--tensor-paralell-size")
    assert item.status is NEVER
    assert (item.instead or "").startswith("--tensor-parallel-size")
    assert _item(_check("m --quantization awq2"), "--quantization").instead == "--quantization awq, if that was meant"
    assert "--enable-lora" in (_item(_check("m --max-loras 8"), "--max-loras").instead or "")
    assert _item(_check("m --limit-mm-per-prompt image=4"), "--limit-mm-per-prompt").instead == (
        """--limit-mm-per-prompt '{"image": 4}'"""
    )


@each(
    ("command", "vllm", "environment", "end"),
    [
        ("m --max-model-len 25.6K", "0.32.0", {}, "serve m"),  # what the parser refuses is left out
        ("m --gpu-memory-utilization=90", "0.32.0", {}, "--gpu-memory-utilization 90"),  # its default was not meant
        ("--model m --port 1", "0.32.0", {}, "vllm serve m --port 1"),
        ("m --config=c.yaml", "0.32.0", {}, "serve m --config c.yaml"),
        # The last of several switches wins: remote code that was switched off stays off.
        ("m --trust-remote-code --no-trust-remote-code", "0.32.0", {}, "serve m"),
        ("m --no-enable-prefix-caching --enable-prefix-caching", "0.32.0", {}, "serve m"),
        ("m --enforce-eager --no-enforce-eager --enforce-eager", "0.32.0", {}, "--enforce-eager"),
        ("m --enable-chunked-prefill False", "0.32.0", {}, "serve m --no-enable-chunked-prefill"),
        ("m --enable-chunked-prefill=False", "0.32.0", {}, "serve m --no-enable-chunked-prefill"),
        ("m", "0.32.0", XFORMERS, "serve m"),  # no backend any more: a command with it would be refused
        ("m", "0.32.0", {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}, "TRITON_ATTN"),
        ("m", "0.32.0", {"VLLM_ATTENTION_BACKEND": "$BACKEND"}, "$BACKEND"),
        ("m --attention-backend FLASHINFER", "0.32.0", FLASH, "--attention-backend FLASHINFER"),  # the command wins
        ("m --worker-use-ray --distributed-executor-backend mp", "0.32.0", {}, "--distributed-executor-backend mp"),
        # vLLM forgets the JSON when a dotted key stands beside it, so the key is put into the JSON.
        (
            """m --hf-overrides '{"a": 1}' --rope-theta 1000000""",
            "0.32.0",
            {},
            '--hf-overrides {"a": 1, "rope_theta": 1000000}',
        ),
        # What says off stays off: the last switch that can be understood wins, and a refused one never takes a good one along.
        ("m --no-enable-prefix-caching --enable-prefix-caching=false", "0.32.0", {}, "serve m --no-enable-prefix-caching"),
        ("m --enable-prefix-caching=false", "0.32.0", {}, "serve m --no-enable-prefix-caching"),
        ("m --enable-prefix-caching False", "0.32.0", {}, "serve m --no-enable-prefix-caching"),
        ("m --enforce-eager true --port 1", "0.32.0", {}, "serve m --enforce-eager --port 1"),
        ("m --no-enable-prefix-caching --enable-prefix-caching=banana", "0.32.0", {}, "serve m --no-enable-prefix-caching"),
        ("m --enable-prefix-caching=banana --no-enable-prefix-caching", "0.32.0", {}, "serve m --no-enable-prefix-caching"),
        ("m --enable-prefix-caching=false --enable-prefix-caching", "0.32.0", {}, "serve m"),
        # A value in the form of another release stays, written as this one takes it.
        ("m --max-model-len 32k", "0.8.0", {}, "--max-model-len 32000"),
        ("m --max-model-len=32K", "0.8.0", {}, "--max-model-len 32768"),
        ("m --max-model-len auto", "0.8.0", {}, "serve m"),
        ("m --limit-mm-per-prompt image=4", "0.32.0", {}, '--limit-mm-per-prompt {"image": 4}'),
        ("m --limit-mm-per-prompt Image=4,video=1", "0.32.0", {}, '--limit-mm-per-prompt {"image": 4, "video": 1}'),
        ("m --limit-mm-per-prompt image=many", "0.32.0", {}, "serve m"),
        ("m --tensor-parallel-size 0 --port 99999", "0.32.0", {}, "--tensor-parallel-size 0 --port 99999"),  # nobody meant 1
        ("m --max-loras 8", "0.32.0", {}, "serve m"),
        ("m --port 1", "0.5.0", {}, "python -m vllm.entrypoints.openai.api_server --model m --port 1"),
    ],
)
def test_the_rewritten_command(command: str, vllm: str, environment: dict[str, str], end: str) -> None:
    """Everything that was meant is kept in the words of that release, and nothing that it refuses."""
    assert f" {' '.join(_check(command, vllm, **environment).rewritten)}".endswith(f" {end}")


@each(
    ("command", "environment", "words"),
    [
        ("m --gpu-memory-utilization=90", {}, "for you to set"),
        ("m", XFORMERS, "VLLM_ATTENTION_BACKEND (--attention-backend is not known to take 'XFORMERS')"),
        ("m --attention-backend FLASHINFER", FLASH, "VLLM_ATTENTION_BACKEND (--attention-backend is given)"),
        ("m --enable-prefix-caching=banana --no-enable-prefix-caching", {}, "command: --enable-prefix-caching banana"),
        ("m --no-enable-prefix-caching --enable-prefix-caching=banana", {}, "command: --enable-prefix-caching banana"),
        ("m --tensor-parallel-size 0 --port 99999", {}, "and for you to set: --tensor-parallel-size 0, --port 99999"),
        ("m --max-loras 8", {}, "left out of the rewritten command: --max-loras 8"),
        ("m --swap-space 8 --max-num-seqs 1k --made-up 3", {}, "left out of the rewritten command: --max-num-seqs 1k, --m"),
    ],
)  # fmt: skip
def test_no_intent_is_dropped_without_a_word(command: str, environment: dict[str, str], words: str) -> None:
    """What the rewrite leaves out or alone is said."""
    assert any(words in note for note in _check(command, **environment).notes)


@each(
    ("command", "vllm", "starts"),
    [
        ("m --port 1 stray", "0.32.0", False),
        ("m --limit-mm-per-prompt image=4", "0.32.0", False),
        ("m --limit-mm-per-prompt image=4", "0.7.3", True),
        ("m --kv-transfer-config notjson", "0.32.0", False),
        ("m --port ''", "0.32.0", False),
        ("m --seed None", "0.32.0", False),
        ("m --port.x 3", "0.32.0", False),
        ("m --config a.yaml --config b.yaml", "0.32.0", False),
        ("m --config a.json", "0.32.0", False),
        ("m --enable-prefix-caching=false", "0.32.0", False),
        ("m --max-model-len 32k", "0.8.0", False),
        ("m --tensor-parallel-size 0", "0.32.0", False),
        ("--model m", "0.8.0", False),  # before 0.8.3 the model was no flag of `vllm serve`
    ],
)
def test_what_argparse_and_vllm_stop_at_does_not_start(command: str, vllm: str, *, starts: bool) -> None:
    """Words, values and shapes that the parser refuses."""
    assert _check(command, vllm).starts == starts


@each(
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
    item = _item(_check(f"m --max-model-len {value}", "0.8.0"), "--max-model-len")
    assert (item.status, item.since, item.instead) == (FlagStatus.NEVER_EXISTED, since, instead)
    assert ("no release takes" in (item.note or "")) is (since is None)


@each(
    ("words", "entries", "name", "status"),
    [
        ("m --max-loras 8", {"enable-lora": True}, "--max-loras", OK),  # the file may hold the switch, also one not at hand
        ("m --max-loras 8", None, "--max-loras", OK),
        ("m --max-loras 8", {"port": 1}, "--max-loras", IDLE),
        ("", {"model": "m", "swap-space": 4, "port": 8001}, "--swap-space", REMOVED),
        ("", {"model": "m", "swap_space": "4"}, "--model", OK),  # a model in the file is nothing to scold
        # `false` is what vLLM makes of it: dropped, so idle where the default is on and harmless where it is off.
        ("m", {"enable-prefix-caching": False}, "--enable-prefix-caching", IDLE),
        ("m", {"enforce-eager": False}, "--enforce-eager", FlagStatus.REDUNDANT),
        ("m", {"trust-remote-code": True}, "--trust-remote-code", OK),
    ],
)
def test_flags_in_a_config_file_are_checked_too(
    words: str, entries: dict[str, object] | None, name: str, status: FlagStatus
) -> None:
    """Each with the file it stands in; what must be edited there is said, and so is a file that is not at hand."""
    launch = Launch("test", EntryPoint.SERVE, (*words.split(), "--config", "c.yaml"))
    checked = check(launch, engine_named("0.32.0"), config=ConfigFile("c.yaml", entries))
    item = _item(checked, name)
    assert (item.status, checked.model) == (status, "m")
    assert ("from c.yaml" in (item.note or "")) is (name not in words)
    assert any("not at hand" in note for note in checked.notes) is (entries is None)
    assert any(f"edit c.yaml: {name[2:]}" in note for note in checked.notes) is (name not in words and status.is_problem)


def test_a_redundant_switch_stays_where_a_file_says_otherwise() -> None:
    """The file is still read: without the switch on the command line it would have the last word."""
    launch = Launch("test", EntryPoint.SERVE, ("m", "--config", "c.yaml", "--enable-prefix-caching"))
    checked = check(launch, engine_named("0.32.0"), config=ConfigFile("c.yaml", {"no-enable-prefix-caching": True}))
    assert checked.rewritten[-1] == "--enable-prefix-caching"


def test_an_upgrade_shows_the_defaults_the_command_leaves_alone() -> None:
    """Those of flags and variables, not of what the command sets itself; one kind of nothing for another is no change."""
    older = {i.name for i in _check("m", "0.32.0", "0.6.3").items if i.status is FlagStatus.DEFAULT_CHANGED}
    assert not older & {"--config", "--model-loader-extra-config", "--limit-mm-per-prompt", "--model"}
    assert {"--ignore-patterns", "--allowed-origins", "--block-size"} <= older
    changed = {i.name: i for i in _check("m", "0.32.0", "0.19.0").items if i.status is FlagStatus.DEFAULT_CHANGED}
    assert "0.9 in 0.19.0, 0.92 in 0.32.0" in (changed["--gpu-memory-utilization"].note or "")
    assert changed["--gpu-memory-utilization"].since == "0.20.0"
    assert "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS" in changed  # on by default since 0.20.0
    pinned = _check("m --gpu-memory-utilization 0.9", "0.32.0", "0.19.0")
    assert _item(pinned, "--gpu-memory-utilization").status is FlagStatus.OK
    assert any("CUDA graphs" in change.change for change in pinned.changes)


def test_variables_are_kept_judged_or_left_out() -> None:
    """Those of other programs are not judged and not lost, a plugin's is unknown, and what cannot change vLLM is not listed."""
    checked = _check("m", LMCACHE_CONFIG_FILE="x.yaml", LD_LIBRARY_PATH="/x")
    assert dict(checked.rewritten_environment) == {"LMCACHE_CONFIG_FILE": "x.yaml", "LD_LIBRARY_PATH": "/x"}
    assert _item(_check("m", VLLM_ACME_MODE="1"), "VLLM_ACME_MODE").status is FlagStatus.UNKNOWN
    assert not [i for i in _check("m", EDITOR="vi", LOG_DIR="/var/log").items if i.name in ("EDITOR", "LOG_DIR")]


def test_needs_are_about_flags_that_exist() -> None:
    """Both sides of every pair are flags of a release, and the needed one is still there."""
    assert all(history_of(name) and needs.flag in flags_of(newest()) for name, needs in NEEDS.items())


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
    checked = _check(f"m {typed}")
    assert checked.rewritten == ("vllm", "serve", "m", *words)
    told = any(note.startswith("corrected in the rewritten command: ") for note in checked.notes)
    assert told is (bool(words) and typed.split()[0] not in words and "8192" not in words and "--no-" not in typed)
