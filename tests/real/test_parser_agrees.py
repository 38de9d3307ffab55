"""vLLM 0.32.0's own parser, asked about everything our tables say of it."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lab.engine.install import engine_home, site_packages
from lab.engine.parser import ParserProcess
from plimsoll.assets.launch import WAYS, launch_files
from plimsoll.errors import BadInput
from plimsoll.launch.check_flags import FlagStatus, check, out_of_range, value_problem
from plimsoll.launch.command_line import EntryPoint, Launch, UnresolvedWords, read_command_line
from plimsoll.launch.files import read_launches
from plimsoll.render.flags import rewritten_line
from plimsoll.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.vllm import versions
from plimsoll.vllm.flag_notes import GONE, GONE_VARIABLES, NEEDS, RANGES, own_values
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, FlagRow, flags_of, history_of
from plimsoll.vllm.versions import engine_named
from tests.assets.plans import random_plan, settings_of
from tests.assets.started import started_words
from tests.each import each
from tests.real.conftest import need_vllm

RELEASE = "0.32.0"
ARTICLE = Path(__file__).parents[2] / "examples" / "article-start.sh"
# The parser has these as well, and no release's table needs them.
OWN = {"-h", "--help"}
ASKED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("parser.yaml").read_text(encoding="utf-8"))


def _sample(row: FlagRow) -> list[str]:
    """A value the flag surely takes."""
    if not row.takes_value:
        return []
    value = row.choices[0] if row.choices else {"int": "2", "float": "0.5", "human-int": "4k", "human-int-or-auto": "4k"}.get(
        row.kind, "{}" if row.kind == "json" else "x"
    )  # fmt: skip
    count = row.nargs if isinstance(row.nargs, int) else 1
    return [value] * count


def test_both_know_the_same_flags(parser: ParserProcess) -> None:
    """No flag and no --no- form is on one side alone; arity, choices, kinds and defaults are the real parser's."""
    actions = {name: action for action in parser.dump() for name in action["option_strings"]}
    table = flags_of(RELEASE)
    negated = {f"--no-{name[2:]}" for name, row in table.items() if row.kind == "on-off" and name.startswith("--")}
    assert set(actions) - OWN == set(table) | negated
    differ: list[Any] = []
    for name, row in table.items():
        action = actions[name]
        arity = 0 if not row.takes_value else row.nargs
        # The processor's device list depends on the machine; the table leaves such choices out.
        choices = [str(c) for c in action["choices"]] if action["choices"] and row.choices is not None else None
        if action["nargs"] != arity or (choices is not None and sorted(choices) != sorted(row.choices or ())):
            differ.append((name, action["nargs"], arity, choices, row.choices))
        kind = str(action["type"])
        if row.takes_value and kind not in ({"_optional_type"} if row.is_optional else set(ASKED["kinds"][row.kind])):
            differ.append((name, row.kind, row.is_optional, kind))
        real = action["default"]
        real = real["repr"] if isinstance(real, dict) and set(real) == {"repr"} else real
        if row.default is UNKNOWN_DEFAULT or row.default == {} or name != row.name:
            continue
        # Sets and enum members reach us as their repr.
        is_same = real in (row.default, repr(row.default), "==SUPPRESS==") or f": {row.default!r}>" in str(real)
        if not is_same and not (row.default == [] and real in ("set()", [])):
            differ.append((name, row.default, real))
    assert not differ


# --config reads a file and has a test of its own; --grpc-port wants an environment variable.
NOT_ALONE = {"--config", "--grpc-port"}


def test_every_flag_we_call_ok_is_taken_and_every_one_we_call_removed_is_refused(parser: ParserProcess) -> None:
    """Each of the table with a value of its kind; each that an earlier release had is an unrecognised argument."""
    refused = []
    for name, row in flags_of(RELEASE).items():
        words = ASKED["wants"].get(row.name, _sample(row))
        answer = parser.parse(["serve", *([] if row.name == "--model" else ["m"]), name, *words])
        if not answer["ok"] and row.name not in NOT_ALONE:
            refused.append((name, words, answer["error"]))
    assert not refused
    taken = []
    aliases = {a for stretches in versions.rows("flags").values() for s in stretches for a in s.get("aliases", ())}
    removed = [name for name in {*versions.rows("flags"), *aliases} if name not in flags_of(RELEASE)]
    assert len(removed) > 50
    for name in removed:
        row = history_of(name)[-1]
        answer = parser.parse(["serve", "m", name, *_sample(row)])
        launch = Launch("test", EntryPoint.SERVE, ("m", name, *_sample(row)))
        status = next(i.status for i in check(launch, engine_named(RELEASE)).items if i.name == name)
        # A removed name may be the unique prefix of a living flag; then both take it.
        if answer["ok"] is (status is FlagStatus.REMOVED):
            taken.append((name, status, answer))
    assert not taken


def test_what_both_take_and_refuse(parser: ParserProcess, tmp_path: Path) -> None:
    """`enable-x: false` in a file is ignored, --config=FILE is never opened; -O 3 is taken, -O JSON and a second model not."""
    config = tmp_path / "c.yaml"
    config.write_text("enable-prefix-caching: false\nenforce-eager: true\n", encoding="utf-8")
    answer = parser.parse(["serve", "m", "--config", str(config)])
    assert answer["namespace"].get("enforce_eager") is True
    assert "enable_prefix_caching" not in answer["namespace"]
    config.write_text("port: 8123\nswap-space: 4\n", encoding="utf-8")
    ignored = parser.parse(["serve", "m", f"--config={config}"])
    assert ignored["ok"]
    assert "port" not in ignored["namespace"]
    assert "swap-space" in parser.parse(["serve", "m", "--config", str(config)])["error"]
    for words, is_taken in ((["m", "-O", "3"], True), (["m", "-O", '{"mode": 3}'], False), (["a", "--model", "b"], False)):
        assert parser.parse(["serve", *words])["ok"] is is_taken, words
        line = read_command_line(words, RELEASE)
        assert (line.arguments[0].row is not None and not line.leftovers) is is_taken, words
    for name in ("--max-num-on-the-fly-batches", "--enable-memory-compaction", "--made-up"):
        assert "unrecognized arguments" in parser.parse(["serve", "m", name, "4"])["error"]


def launches() -> Iterator[Launch]:
    """Commands with something wrong in them, one with each removed flag, and one with each variable that became a flag."""
    for command in ASKED["rewritten"]:
        yield Launch("test", EntryPoint.SERVE, tuple(shlex.split(command)))
    for name in sorted(GONE):
        value = ASKED["values of what is gone"].get(name)
        values = [value] if value else _sample(history_of(name)[-1])
        yield Launch("test", EntryPoint.SERVE, ("m", name, *values))
    for variable in ASKED["variables that became flags"].items():
        assert GONE_VARIABLES[variable[0]].rewrite
        yield Launch("test", EntryPoint.SERVE, ("m",), (variable,))


@each("launch", launches)
def test_rewritten_commands_are_taken(parser: ParserProcess, launch: Launch) -> None:
    """Whatever was wrong with a command, the real parser takes what we make of it (a missing file aside)."""
    checked = check(launch, engine_named(RELEASE))
    assert len(checked.rewritten) > 3 or not launch.environment
    words = [w for w in checked.rewritten[1:] if w not in ("--config", "c.yaml")]
    answer = parser.parse(words)
    assert answer["ok"], (words, answer)


def test_the_articles_rewritten_command_is_taken_and_what_is_refused_beside_is_refused(parser: ParserProcess) -> None:
    """With every value in place; of the -config options 3 is refused where we say so, and so are switches that need another."""
    (launch,) = read_launches(str(ARTICLE))
    assert not parser.parse(list(launch.arguments), entry="api_server")["ok"]
    words = shlex.split(rewritten_line(check(launch, engine_named(RELEASE))))
    after = parser.parse(words[words.index("serve") :])
    assert after["ok"], after
    wanted = {
        "tensor_parallel_size": 4, "gpu_memory_utilization": 0.88, "max_num_batched_tokens": 24576, "trust_remote_code": True,
    }  # fmt: skip
    assert wanted.items() <= after["namespace"].items()
    rows = {name: row for name, row in flags_of(RELEASE).items() if row.kind == "json" and name.endswith("-config")}
    ours = {name for name, row in rows.items() if out_of_range(row, "3", RELEASE, frozenset())}
    assert ours == {name for name in rows if not parser.parse(["serve", "m", name, "3"])["ok"]}
    for name in (name for name, need in NEEDS.items() if need.is_refused):
        assert not parser.parse(["serve", "m", name])["ok"], name


def test_random_command_lines_are_read_alike(parser: ParserProcess) -> None:
    """300 random command lines, drawn fresh: taken, refused and given the same model by both parsers."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    rows = sorted({row.name: row for row in flags_of(RELEASE).values() if row.name not in ASKED["side effects"]}.values())
    for _ in range(300):
        words = ["m"] if dice.random() < 0.8 else []
        for row in dice.sample(rows, dice.randrange(4)):
            words += _random_flag(row, dice)
        answer = parser.parse(["serve", *words])
        line = read_command_line(words, RELEASE)
        refused = bool(line.leftovers) or any(
            a.row is None or (value_problem(a, UnresolvedWords()) is not None if not a.path else False) for a in line.arguments
        )
        # What only vLLM can judge (JSON for a config class, a plugin's name) it may refuse on top.
        if refused or (not answer["ok"] and re.search(ABOUT_WORDS, answer["error"])):
            assert refused == (not answer["ok"]), (seed, words, answer, line)
        if answer["ok"] and line.model is not None:
            assert answer["namespace"].get("model_tag", line.model) == line.model


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


ABOUT_WORDS = (
    r"unrecognized arguments|expected (one|at least one|\d+) argument|ambiguous option|invalid choice|ignored explicit"
)
"""Of a refusal that is about what the line says, not about what a value means."""


@each("text", ASKED["numbers"])
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


def test_the_names_of_an_open_list_and_the_limits_of_numbers_are_the_releases_own() -> None:
    """What we call a name of 0.32.0's own stands in its source, none is missing; so does every limit in its configuration."""
    need_vllm()
    source = (site_packages(engine_home()) / "vllm/model_executor/layers/quantization/__init__.py").read_text("utf-8")
    listed = source[source.index("QuantizationMethods = Literal[") : source.index("QUANTIZATION_METHODS: ")]
    assert set(re.findall(r'^    "([\w-]+)",$', listed, re.MULTILINE)) == own_values("--quantization", RELEASE)
    texts = [path.read_text("utf-8") for path in (site_packages(engine_home()) / "vllm/config").glob("*.py")]
    for name, limits in RANGES.items():
        if limits.since is not None:
            field = re.compile(rf"^    {name.removeprefix('--').replace('-', '_')}: .* = Field\((.*)\)", re.MULTILINE)
            (said,) = {found for text in texts for found in field.findall(text)}
            ends = {"gt=0"} if "gt=0" in said and limits.least == 1 else {f"ge={limits.least:g}"}
            ends |= {f"lt={limits.most:g}"} if limits.below else set()
            assert {end.removesuffix(".0") for end in re.findall(r"\b[gl][et]=[0-9.]+", said)} == ends, name


def test_the_commands_of_fifty_random_plans_are_taken_by_the_real_parser(parser: ParserProcess, tmp_path: Path) -> None:
    """As a shell, Docker and the kubelet start them; with the gate, the probe and the timer that the files reckon with."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(50):
        made = settings_of(random_plan(dice))
        for way, words in started_words(launch_files(made, WAYS), tmp_path).items():
            assert words[:2] == ["vllm", "serve"]
            answer = parser.parse(words[1:])
            assert answer["ok"], (seed, way, words, answer)
            space = answer["namespace"]
            assert space["shutdown_timeout"] == made.timers.shutdown_s, (seed, way, words)
            assert space["middleware"][-1] == "plimsoll.inside.Gate", (seed, way, words)
            assert space.get("api_key") is None, (seed, way, words)
            assert space.get("port", 8000) == made.command.port if made.command else False, (seed, way, words)
