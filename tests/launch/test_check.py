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
from tests.each import cases, each, rows

CASES = Path(__file__).parent / "cases.txt"
ARTICLE = Path(__file__).parents[2] / "examples" / "article-start.sh"


def _check(command: str, vllm: str = "0.32.0", came_from: str | None = None, **environment: str) -> FlagReport:
    words = tuple(shlex.split(command))
    unresolved = tuple(word[1:] for word in words if word.startswith("$"))
    launch = Launch("test", EntryPoint.SERVE, words, tuple(environment.items()), unresolved=unresolved)
    return check(launch, engine_named(vllm), engine_named(came_from) if came_from else None)


def _item(checked: FlagReport, name: str) -> Item:
    return next(item for item in checked.items if item.name == name)


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


REMOVED, OK, IDLE = FlagStatus.REMOVED, FlagStatus.OK, FlagStatus.NO_EFFECT


@each(("command", "vllm", "status", "since", "words"), rows(CASES, "verdicts"))
def test_the_verdict_on_a_flag(command: str, vllm: str, status: str, since: str, words: str) -> None:
    """Each flag of a command has its status, the release that decides it, and the words that explain it."""
    checked = _check(command, vllm)
    item = next(item for item in checked.items if item.name[0] in "-\N{EM DASH}" and item.name in command)
    assert item.status == status
    assert since in ("-", item.since)
    assert words in (item.note or "")


def test_a_mistyped_flag_is_offered_its_neighbour() -> None:
    """The nearest real flag is named."""
    item = _item(_check("m --tensor-paralell-size 4"), "--tensor-paralell-size")
    assert item.status is FlagStatus.NEVER_EXISTED
    assert (item.instead or "").startswith("--tensor-parallel-size")
    assert _item(_check("m --quantization awq2"), "--quantization").instead == "--quantization awq, if that was meant"
    assert "--enable-lora" in (_item(_check("m --max-loras 8"), "--max-loras").instead or "")
    assert _item(_check("m --limit-mm-per-prompt image=4"), "--limit-mm-per-prompt").instead == (
        """--limit-mm-per-prompt '{"image": 4}'"""
    )


@each(("command", "vllm", "variables", "end"), rows(CASES, "rewritten"))
def test_the_rewritten_command(command: str, vllm: str, variables: str, end: str) -> None:
    """Everything that was meant is kept in the words of that release, and nothing that it refuses."""
    checked = _check(command, vllm, **dict(pair.split("=") for pair in variables.split()))
    assert f" {' '.join(checked.rewritten)}".endswith(f" {end}")


@each(("command", "variables", "words"), rows(CASES, "notes"))
def test_no_intent_is_dropped_without_a_word(command: str, variables: str, words: str) -> None:
    """What the rewrite leaves out or alone is said."""
    assert any(words in note for note in _check(command, **dict(pair.split("=") for pair in variables.split())).notes)


@each(("command", "vllm", "starts"), rows(CASES, "starts"))
def test_what_argparse_and_vllm_stop_at_does_not_start(command: str, vllm: str, starts: str) -> None:
    """Words, values and shapes that the parser refuses."""
    assert _check(command, vllm).starts == (starts == "yes")


@each(("value", "since", "instead"), rows(CASES, "later numbers"))
def test_a_number_that_only_later_releases_read(value: str, since: str, instead: str) -> None:
    """0.8.0 takes whole numbers alone: the release that reads more is named, and what to write until then."""
    item = _item(_check(f"m --max-model-len {value}", "0.8.0"), "--max-model-len")
    assert (item.status, item.since or "-", item.instead or "-") == (FlagStatus.NEVER_EXISTED, since, instead)
    assert ("no release takes" in (item.note or "")) is (since == "-")


@each(("words", "entries", "name", "status"), cases("launch", "flags_in_a_config_file_are_checked_too"))
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
    assert any(f"edit c.yaml: {name[2:]}" in note for note in checked.notes) is (name not in words and item.status.is_problem)


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


@each(("typed", "words"), rows(CASES, "misspelt"))
def test_a_misspelt_flag_is_corrected_where_one_is_near(typed: str, words: str) -> None:
    """The rewritten command has the flag that was meant, a note says so, and what is not sure is left out."""
    checked = _check(f"m {typed}")
    assert checked.rewritten == ("vllm", "serve", "m", *words.split())
    told = any(note.startswith("corrected in the rewritten command: ") for note in checked.notes)
    assert told is (bool(words) and typed.split()[0] not in words.split() and "8192" not in words and "--no-" not in typed)


def test_a_number_that_the_pod_fills_in_is_not_refused() -> None:
    """As LeaderWorkerSets give it: what `$(NAME)` stands for is not known here."""
    launch = Launch("test", EntryPoint.SERVE, ("m", "--nnodes", "$(LWS_GROUP_SIZE)"), unresolved=("LWS_GROUP_SIZE",))
    assert check(launch, engine_named("0.28.0")).starts
