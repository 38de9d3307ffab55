"""vLLM 0.32.0's own parser, asked about everything our tables say of it."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.engine.parser import ParserProcess
from plimsoll.domain.launch import EntryPoint, Launch
from plimsoll.domain.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.engine import tables
from plimsoll.engine.check import Status, check
from plimsoll.engine.command_line import read_command_line
from plimsoll.engine.flag_notes import GONE, GONE_VARIABLES
from plimsoll.engine.flags import UNKNOWN_DEFAULT, FlagRow, flags_of, history_of
from plimsoll.engine.values import value_problem
from plimsoll.engine.versions import engine_named
from plimsoll.errors import BadInput
from plimsoll.report.flags import rewritten_line
from plimsoll.sources.launches import read_launches

RELEASE = "0.32.0"
ARTICLE = Path(__file__).parents[2] / "examples" / "article-start.sh"
# The parser has these as well, and no release's table needs them.
OWN = {"-h", "--help"}


@pytest.fixture(scope="module")
def actions(parser: ParserProcess) -> dict[str, dict[str, Any]]:
    """Option string to the real parser's action."""
    return {name: action for action in parser.dump() for name in action["option_strings"]}


def _sample(row: FlagRow) -> list[str]:
    """A value the flag surely takes."""
    if not row.takes_value:
        return []
    value = row.choices[0] if row.choices else {"int": "2", "float": "0.5", "human-int": "4k", "human-int-or-auto": "4k"}.get(
        row.kind, "{}" if row.kind == "json" else "x"
    )  # fmt: skip
    count = row.nargs if isinstance(row.nargs, int) else 1
    return [value] * count


def test_both_know_the_same_flags(actions: dict[str, dict[str, Any]]) -> None:
    """No flag of the real parser is missing from the table, and the table has none that the parser lacks."""
    real = {name for name in actions if not name.startswith("--no-")} - OWN
    assert real == set(flags_of(RELEASE))


def test_every_negation_is_known(actions: dict[str, dict[str, Any]]) -> None:
    """The parser has a --no- form exactly where the table says on-off."""
    real = {name for name in actions if name.startswith("--no-")}
    ours = {
        "--no-" + name.removeprefix("--")
        for name, row in flags_of(RELEASE).items()
        if row.kind == "on-off" and name.startswith("--")
    }
    assert real == ours


def test_shapes_agree(actions: dict[str, dict[str, Any]]) -> None:
    """Arity and choices of every flag are the real parser's."""
    differ = []
    for name, row in flags_of(RELEASE).items():
        action = actions[name]
        arity = 0 if not row.takes_value else row.nargs
        # The processor's device list depends on the machine; the table leaves such choices out.
        choices = [str(c) for c in action["choices"]] if action["choices"] and row.choices is not None else None
        if action["nargs"] != arity or (choices is not None and sorted(choices) != sorted(row.choices or ())):
            differ.append((name, action["nargs"], arity, choices, row.choices))
    assert not differ


def test_defaults_agree(actions: dict[str, dict[str, Any]]) -> None:
    """Every default we state is the one the real parser has, objects and enums by their value."""
    differ = []
    for name, row in flags_of(RELEASE).items():
        real = actions[name]["default"]
        real = real["repr"] if isinstance(real, dict) and set(real) == {"repr"} else real
        if row.default is UNKNOWN_DEFAULT or row.default == {} or name != row.name:
            continue
        if real in (row.default, repr(row.default)) or real == "==SUPPRESS==":
            continue
        # Sets and enum members reach us as their repr.
        if (row.default == [] and real in ("set()", [])) or f": {row.default!r}>" in str(real):
            continue
        differ.append((name, row.default, real))
    assert not differ


def test_every_flag_we_call_ok_is_taken(parser: ParserProcess) -> None:
    """Each flag of the table, with a value of its kind, is recognised by the real parser."""
    refused = []
    for name, row in flags_of(RELEASE).items():
        answer = parser.parse(["serve", *([] if row.name == "--model" else ["m"]), name, *_sample(row)])
        if not answer["ok"] and "unrecognized arguments" in answer["error"]:
            refused.append((name, answer["error"]))
    assert not refused


def test_every_flag_we_call_removed_is_refused(parser: ParserProcess) -> None:
    """Each flag that an earlier release had and 0.32.0 lacks is an unrecognised argument to the real parser."""
    taken = []
    removed = [name for name in tables.rows("flags") if name not in flags_of(RELEASE) and name.startswith("--")]
    assert len(removed) > 50
    for name in removed:
        row = history_of(name)[-1]
        answer = parser.parse(["serve", "m", name, *_sample(row)])
        launch = Launch("test", EntryPoint.SERVE, ("m", name, *_sample(row)))
        status = next(i.status for i in check(launch, engine_named(RELEASE)).items if i.name == name)
        # A removed name may be the unique prefix of a living flag; then both take it.
        if answer["ok"] is (status is Status.REMOVED):
            taken.append((name, status, answer))
    assert not taken


def test_a_model_given_twice_is_refused(parser: ParserProcess) -> None:
    """A positional model beside --model is a word too many, for both."""
    assert not parser.parse(["serve", "a", "--model", "b"])["ok"]
    assert read_command_line(["a", "--model", "b"], RELEASE).leftovers == ("a",)


def test_flags_that_never_existed_are_refused(parser: ParserProcess) -> None:
    """The article's invention, and any other, is refused by the real parser."""
    for name in ("--max-num-on-the-fly-batches", "--enable-memory-compaction", "--made-up"):
        answer = parser.parse(["serve", "m", name, "4"])
        assert not answer["ok"]
        assert "unrecognized arguments" in answer["error"]


def test_the_articles_rewritten_command_is_taken(parser: ParserProcess) -> None:
    """What `plimsoll flags` makes of the article's script starts: the real parser takes it, with every value in place."""
    (launch,) = read_launches(str(ARTICLE))
    before = parser.parse(list(launch.arguments), entry="api_server")
    assert not before["ok"]
    words = shlex.split(rewritten_line(check(launch, engine_named(RELEASE))))
    after = parser.parse(words[words.index("serve") :])
    assert after["ok"], after
    namespace = after["namespace"]
    assert namespace["tensor_parallel_size"] == 4
    assert namespace["gpu_memory_utilization"] == 0.88
    assert namespace["max_num_batched_tokens"] == 24576
    assert namespace["trust_remote_code"] is True


@pytest.mark.parametrize("name", sorted(GONE))
def test_the_rewrite_of_every_gone_flag_is_taken(parser: ParserProcess, name: str) -> None:
    """A command with any one removed flag is taken by the real parser once rewritten."""
    row = history_of(name)[-1]
    value = {"--rope-scaling": '{"rope_type": "yarn"}', "--override-pooler-config": "{}", "-O": '{"mode": 0}',
             "--guided-decoding-backend": "xgrammar", "--chat-template-text-format": "string"}.get(name)  # fmt: skip
    values = [value] if value is not None else _sample(row)
    launch = Launch("test", EntryPoint.SERVE, ("m", name, *values))
    checked = check(launch, engine_named(RELEASE))
    answer = parser.parse(list(checked.rewritten[1:]))
    assert answer["ok"], (checked.rewritten, answer)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_ATTENTION_BACKEND", "FLASH_ATTN"), ("VLLM_FLASH_ATTN_VERSION", "3"),
                        ("VLLM_ALL2ALL_BACKEND", "pplx"), ("VLLM_MM_INPUT_CACHE_GIB", "2"),
                        ("VLLM_TORCH_PROFILER_DIR", "/tmp/p")],
)  # fmt: skip
def test_the_rewrite_of_a_gone_variable_is_taken(parser: ParserProcess, name: str, value: str) -> None:
    """A variable that lost its effect becomes a flag that the real parser takes."""
    assert GONE_VARIABLES[name].rewrite
    launch = Launch("test", EntryPoint.SERVE, ("m",), ((name, value),))
    checked = check(launch, engine_named(RELEASE))
    assert len(checked.rewritten) > 3
    answer = parser.parse(list(checked.rewritten[1:]))
    assert answer["ok"], (checked.rewritten, answer)


def test_random_command_lines_are_read_alike(parser: ParserProcess) -> None:
    """300 random command lines, drawn fresh: taken, refused and given the same model by both parsers."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    rows = sorted({row.name: row for row in flags_of(RELEASE).values() if row.name not in SIDE_EFFECTS}.values())
    for _ in range(300):
        words = ["m"] if dice.random() < 0.8 else []
        for row in dice.sample(rows, dice.randrange(4)):
            words += _random_flag(row, dice)
        answer = parser.parse(["serve", *words])
        line = read_command_line(words, RELEASE)
        refused = bool(line.leftovers) or any(
            a.row is None or (value_problem(a) is not None if not a.path else False) for a in line.arguments
        )
        # What only vLLM can judge (JSON for a config class, a plugin's name) it may refuse on top.
        if refused or _is_about_words(answer):
            assert refused == (not answer["ok"]), (seed, words, answer, line)
        if answer["ok"] and line.model is not None:
            assert answer["namespace"].get("model_tag", line.model) == line.model


# These read files or other arguments while parsing, or take what the machine has.
SIDE_EFFECTS = frozenset(
    "--config --model --lora-modules --chat-template --tool-call-parser --grpc-port --enable-auto-tool-choice --tool-server"
    " --enable-log-outputs --enable-per-request-metrics --data-parallel-multi-port-external-lb --sse-keep-alive-interval"
    " --mm-processor-device".split()
)


def _random_flag(row: FlagRow, dice: random.Random) -> list[str]:
    name = dice.choice(row.spellings)
    if name.startswith("--") and dice.random() < 0.2:
        name = name[: dice.randrange(8, len(name) + 1)] if len(name) > 8 else name
    if name.startswith("--") and dice.random() < 0.2:
        name = name.replace("-", "_").replace("__", "--", 1)
    if row.kind == "on-off" and name.startswith("--") and dice.random() < 0.3:
        name = "--no-" + name.removeprefix("--")
    values = _sample(row) if dice.random() < 0.9 else []
    if values and dice.random() < 0.1:
        values = ["not-a-number"]
    if len(values) == 1 and dice.random() < 0.3:
        return [f"{name}={values[0]}"]
    return [name, *values]


def _is_about_words(answer: dict[str, Any]) -> bool:
    """Whether a refusal is about what the line says, not about what a value means."""
    about = r"unrecognized arguments|expected (one|at least one|\d+) argument|ambiguous option|invalid choice|ignored explicit"
    return not answer["ok"] and re.search(about, answer["error"]) is not None


HUMAN_NUMBERS = ("1k",
                 "1K", "16k", "25.6k", "25.6K", "25.6G", "8GiB", "8g", "0.3k", "1_000", " 12 ", "+5", "-1", "1e3", "", "k",
                 "1.5", "10T")  # fmt: skip


@pytest.mark.parametrize("text", HUMAN_NUMBERS)
def test_human_readable_integers_are_read_alike(parser: ParserProcess, text: str) -> None:
    """16k, 25.6G, 8GiB and the like mean what vLLM's own parser makes of them, refusals included."""
    for flag, dest, ours in (
        ("--max-num-batched-tokens", "max_num_batched_tokens", parse_vllm_integer),
        ("--max-model-len", "max_model_len", parse_vllm_integer_or_auto),
    ):
        answer = parser.parse(["serve", "m", f"{flag}={text}"])
        try:
            expected: int | None = ours(text)
        except BadInput:
            expected = None
        if text == "" and answer["ok"]:
            continue  # vLLM's optional types read nothing as "not set" before the number is looked at
        assert answer["ok"] == (expected is not None), (flag, text, answer)
        if answer["ok"]:
            assert answer["namespace"].get(dest, expected) == expected


def test_a_config_file_behind_an_equals_sign_is_never_opened(parser: ParserProcess, tmp_path: Path) -> None:
    """vLLM takes --config=FILE and does not read it; as two words it does."""
    config = tmp_path / "c.yaml"
    config.write_text("port: 8123\nswap-space: 4\n", encoding="utf-8")
    ignored = parser.parse(["serve", "m", f"--config={config}"])
    assert ignored["ok"]
    assert "port" not in ignored["namespace"]
    read = parser.parse(["serve", "m", "--config", str(config)])
    assert not read["ok"]
    assert "swap-space" in read["error"]
