"""Guard's configuration: what it may hold, and that every mistake in it is one line with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.pods import PodsConfig
from plimsoll.guard.config import ApiConfig, Listen, config_in, is_loopback, listen_of, read_guard_config
from plimsoll.guard.config_reader import KeyLines, read_token
from plimsoll.guard.judge.policy import THRESHOLDS
from tests.options import guard_options

TOKEN = "a-token-that-is-long-enough"
WHOLE = """
# Two engines by hand
[[engine]]
url = "http://10.0.0.1:8000"
name = "first"
token_file = "gate.token"
canary = "20s"
plan = "plan.json"

[[engine]]
url = "https://10.0.0.2:8443/base"

[discover]
file_sd = "engines/*.json"
http_sd = ["http://127.0.0.1:1/sd"]
every = "1m"
[discover.kubernetes]
selector = "app=vllm"
namespace = "models"
port = 8000

[policy]
every = "10s"
preset = "article"
[policy.dead]
refused = "3m"
[[policy.rule]]
name = "mine"
when = "waiting > 100"

[notify]
webhook = "http://127.0.0.1:9093/api/v2/alerts"
repeat = "5m"

[api]
listen = "0.0.0.0:9999"
token_file = "api.token"
hosts = ["Guard.example"]
"""


def plan(folder: Path) -> None:
    """A plan as plimsoll plan --json prints it, in short."""
    body = {
        "kv": {"tokens": 16_000, "num_blocks": 1_000, "bytes_per_block": 1_000},
        "ledger": {"kv": {"low": 9e5, "high": 1.1e6}},
    }
    (folder / "plan.json").write_text(json.dumps(body), encoding="utf-8")


def test_the_whole_of_it(tmp_path: Path) -> None:
    """Everything that can be set is read; files are found beside the configuration."""
    for name in ("gate.token", "api.token"):
        (tmp_path / name).write_text(TOKEN + "\n", encoding="utf-8")
    plan(tmp_path)
    path = tmp_path / "plimsoll.toml"
    path.write_text(WHOLE, encoding="utf-8")
    found = read_guard_config(str(path))
    first, second = found.engines
    assert (first.name, first.token, first.canary_s) == ("first", TOKEN, 20.0)
    assert first.plan == pytest.approx((16_000.0, 14_400.0, 17_600.0))
    assert (second.name, second.token, second.canary_s, second.plan) == ("10.0.0.2:8443/base", None, None, None)
    assert found.discover.file_sd == (str(tmp_path / "engines" / "*.json"),)
    assert found.discover.kubernetes == PodsConfig("app=vllm", ("models",), 8000)
    assert (found.discover.every_s, found.notify.webhook, found.notify.repeat_s) == (
        60.0,
        "http://127.0.0.1:9093/api/v2/alerts",
        300.0,
    )
    assert found.api == ApiConfig(Listen("0.0.0.0", 9999), TOKEN, None, ("guard.example",))
    asked = guard_options(["--config", str(path)], {})
    assert asked.policy.every_s == 10.0
    assert asked.policy.number("dead", "refused") == 180.0
    assert [rule.name for rule in asked.policy.rules] == ["article-cache", "article-queue", "mine"]


def test_the_example_on_the_page_is_a_configuration(tmp_path: Path) -> None:
    """What docs/guard.md shows can be used as it is, once its files are there."""
    page = (Path(__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0].replace("/etc/plimsoll/", "")
    for name in ("gate.token", "vllm.key", "guard.token"):
        (tmp_path / name).write_text(TOKEN, encoding="utf-8")
    (tmp_path / "guard-read.token").write_text(f"{TOKEN}-2", encoding="utf-8")
    plan(tmp_path)
    (tmp_path / "plan.json").rename(tmp_path / "llama-a.plan.json")
    path = tmp_path / "plimsoll.toml"
    path.write_text(text, encoding="utf-8")
    asked = guard_options(["--config", str(path)], {})
    (engine,) = asked.config.engines
    assert (engine.name, engine.gate_url, engine.api_key, engine.canary_s) == ("llama-a", "http://10.0.0.1:8001", TOKEN, 30.0)
    assert [rule.name for rule in asked.policy.rules] == ["article-cache", "article-queue", "long-queue"]
    assert (asked.config.api.token, asked.config.api.read_token) == (TOKEN, f"{TOKEN}-2")


def test_a_gate_may_listen_on_a_socket() -> None:
    """A path on this machine, where a token need not pass over a network."""
    (engine,) = config_in("[[engine]]\nurl = 'http://x:1'\ngate = 'unix:/run/g.sock'", "p.toml").engines
    assert engine.gate_url == "unix:/run/g.sock"
    assert guard_options(["--engine", "http://x:1"], {}).config.engines[0].gate_url is None


def test_what_is_found_may_have_a_key_of_its_own(tmp_path: Path) -> None:
    """[discover] api_key_file is for the test requests to engines that nobody named."""
    (tmp_path / "key").write_text("k", encoding="utf-8")
    found = config_in("[discover]\napi_key_file = 'key'\ncanary = true", str(tmp_path / "p.toml"))
    assert (found.discover.api_key, found.discover.canary_s) == ("k", 30.0)


def test_an_engine_is_found_in_prometheus_by_its_instance() -> None:
    """The label is host and port unless a template says otherwise, for all or for one; further labels narrow it."""
    text = (
        "[prometheus]\nurl = 'http://p:9090'\nlabels = {job = 'vllm'}\n"
        "[[engine]]\nurl = 'http://10.0.0.1:8000'\nname = 'a'\n"
        "[[engine]]\nurl = 'https://[::1]/base'\nname = 'b'\n"
        "[[engine]]\nurl = 'http://10.0.0.2:8000'\nname = 'c'\ninstance = '{name}.models:{port}'\n"
    )
    found = config_in(text, "p.toml")
    assert found.prometheus is not None
    assert [found.prometheus.match(one) for one in found.engines] == [
        {"job": "vllm", "instance": "10.0.0.1:8000"},
        {"job": "vllm", "instance": "[::1]:443"},
        {"job": "vllm", "instance": "c.models:8000"},
    ]
    assert config_in("[[engine]]\nurl = 'http://x:1'", "p.toml").prometheus is None


def test_a_secret_that_everybody_can_read_is_said_once(tmp_path: Path) -> None:
    """One line for each file, however often it is named; a file of its owner alone is none."""
    for name, mode in (("open", 0o644), ("shut", 0o640)):
        (tmp_path / name).write_text(TOKEN, encoding="utf-8")
        (tmp_path / name).chmod(mode)
    text = "[[engine]]\nurl = 'http://x:1'\ntoken_file = 'open'\napi_key_file = 'shut'\n[api]\ntoken_file = 'open'\n"
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    (said,) = read_guard_config(str(path)).warnings
    assert said.startswith(f"{tmp_path / 'open'} is a secret that every user of this machine can read")
    asked = guard_options(["--config", str(path), "--token-file", str(tmp_path / "open")], {})
    assert asked.config.warnings == (said,)
    assert guard_options(["--engine", "http://x:1", "--token-file", str(tmp_path / "open")], {}).config.warnings == (said,)


def test_an_empty_one_is_one() -> None:
    """Nothing need be set."""
    found = config_in("", "x.toml")
    assert (found.engines, found.notify.webhook, found.api) == ((), None, ApiConfig())
    assert (found.api.host, found.api.port) == ("127.0.0.1", 9790)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a = ", 1, "not TOML"),
        ("[api]\nlisten = 'x", 2, "not TOML"),
        ("\n\n[[engine\n", 3, "not TOML"),
        ("[engines]\nurl = 'http://x:1'", 1, "there is no 'engines'; did you mean engine? known: engine, discover"),
        ("engine = 3", 1, "write [[engine]]"),
        ("[engine]\nurl = 'http://x:1'", 1, "write [[engine]]"),
        ("[[engine]]\nname = 'a'", 1, "needs its url"),
        ("[[engine]]\nurl = 'http://x:1'\n[[engine]]\nurl = 'ftp://x'", 4, "http://HOST:PORT"),
        ("[[engine]]\nurl = 'http://x:1'\nurll = 'y'", 3, "[engine] has no 'urll'; did you mean url? known: name, url"),
        ("[[engine]]\nurl = 'http://x:1'\n\n[[engine]]\nurl = 'http://x:1'", 5, "is an engine already, in line 1"),
        ("[[engine]]\nurl = 'http://x:1'\nname = 'a'\n[[engine]]\nurl = 'http://y:1'\nname = 'a'", 6, "in line 1"),
        ("[[engine]]\nurl = 'http://x:1'\ncanary = '1s'", 3, "between 5 and 60"),
        ("[[engine]]\nurl = 'http://x:1'\ncanary = 'often'", 3, "is no time"),
        ("[[engine]]\nurl = 'http://x:1'\ntoken_file = 'gate.token'", 3, "gate.token cannot be read (No such file"),
        ("[[engine]]\nurl = 'http://x:1'\nplan = 'nowhere'", 3, "nowhere: No such file"),
        ("[[engine]]\nurl = 'http://x:1'\nname = ''", 3, "an empty name is none"),
        ("[[engine]]\nurl = 'http://x:1'\n\nname = '  '", 4, "an empty name is none"),
        ("[[engine]]\nurl = 'http://x:1'\ngate = 'unix:run/g.sock'", 3, "a socket is unix:/PATH"),
        (f"[[engine]]\nurl = 'http://x:1'\ngate = 'unix:/{'x' * 120}'", 3, "of 107 letters at most"),
        ("[[engine]]\nurl = 'http://x:1'\ninstance = 'a'", 3, "label of [prometheus], and there is none"),
        ("[prometheus]\nlabels = {job = 'vllm'}", 1, "needs its url"),
        ("[prometheus]\nurl = 'prometheus'", 2, "http://HOST:PORT"),
        ("[prometheus]\nurl = 'http://x:1'\n[prometheus.labels]\njob-name = 'a'", 4, "not the name of a label"),
        ("[prometheus]\nurl = 'http://x:1'\n[prometheus.labels]\njob = 3", 4, "a text on one line"),
        ("[prometheus]\nurl = 'http://x:1'\ninstance = '{pod}'", 3, "{pod} stands for nothing"),
        ("[discover]\napi_key_file = 'nowhere'", 2, "nowhere cannot be read (No such file"),
        ("[discover]\nfile_sd = 'x.toml'", 2, "reads .json"),
        ("[discover]\nfile_sd = 3", 2, "a text or a list"),
        ("[discover]\nhttp_sd = [\n  'http://x:1',\n  'no',\n]", 2, "http://HOST:PORT"),
        ("[discover]\n[discover.kubernetes]\nport = 1", 2, '[discover.kubernetes] needs its selector = "app=vllm"'),
        ("[discover]\nkubernetes = ''", 2, "not a label selector"),
        ("[discover.kubernetes]\nselector = 'a=b'\nport = 70000", 3, "port is a whole number from 1 to 65535"),
        ("[discover.kubernetes]\nselector = 'a=b'\nnamespace = 'A/B'", 3, "not the name of a namespace"),
        ("discover.every = '2h'", 1, "between 1 and 3600"),
        ("[notify]\nwebhook = 'file:///etc/passwd'", 2, "http://HOST:PORT"),
        ("[notify]\nwebhok = 'http://x'", 2, "has no 'webhok'"),
        ("[api]\nlisten = '9790'", 2, "HOST:PORT"),
        ("[api]\nlisten = '0.0.0.0:9790'", 2, "needs a token_file"),
        ("policy = 3", 1, "[policy] is a table"),
    ],
)
def test_every_mistake_has_its_line(text: str, line: int, says: str, tmp_path: Path) -> None:
    """The file, the line and what is wrong, in one line."""
    with pytest.raises(BadInput) as caught:
        config_in(text, str(tmp_path / "p.toml"))
    message = str(caught.value)
    assert f"p.toml, line {line}: " in message, message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[policy]\nevery = '1ms'", 6, "every must lie"),
        ("[policy.dead]\n# a comment\nrefused = 'soon'", 7, "'soon' is none"),
        ("[policy.ded]\nrefused = '3m'", 5, "there is no condition 'ded'"),
        ("[policy]\ndead.refused = '1s'", 6, "dead.refused must lie"),
        ("[policy]\ndead = { refused = '1s' }", 6, "dead.refused must lie"),
        ("[policy.dead]\nrefusd = '3m'", 6, "has no 'refusd'"),
        (
            "[[policy.rule]]\nname = 'a'\nwhen = 'waiting > 1'\n[[policy.rule]]\nname = 'b'\nwhen = 'hunger > 1'",
            10,
            "no figure",
        ),
        ("[[policy.rule]]\nname = 'A'\nwhen = 'waiting > 1'", 6, "a rule's name"),
        ("[policy]\npreset = 'articel'", 6, "preset is one of"),
        ('[policy.dead]\nrefused = """\n[api]\n3m"""', 6, "is none"),
    ],
)
def test_a_mistake_in_the_policy_has_its_line(text: str, line: int, says: str, tmp_path: Path) -> None:
    """Who judges says what is wrong, and the file says where."""
    path = tmp_path / "p.toml"
    path.write_text("[[engine]]\nurl = 'http://x:1'\n\n\n" + text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        guard_options(["--config", str(path)], {})
    assert f"p.toml, line {line}: " in str(caught.value), str(caught.value)
    assert says in str(caught.value)


def test_every_number_of_the_policy_is_refused_on_its_own_line(tmp_path: Path) -> None:
    """Whichever number is wrong, it is that line which is named."""
    path = tmp_path / "p.toml"
    for place, knob in enumerate(THRESHOLDS):
        tables: dict[str, list[str]] = {}
        for other in THRESHOLDS:
            value = repr(other.default) if other is not knob else "-1"
            tables.setdefault(other.kind, []).append(f"{other.name} = {value}")
        lines = ["[[engine]]", "url = 'http://x:1'"]
        for kind, rows in tables.items():
            lines += [f"[policy.{kind}]", *rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        if place % 5:
            continue  # a fifth of them is enough
        with pytest.raises(BadInput, match=rf"line {lines.index(f'{knob.name} = -1') + 1}: {knob.kind}.{knob.name} must lie"):
            guard_options(["--config", str(path)], {})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder, nothing, other bytes, too much: one line each."""
    with pytest.raises(BadInput, match="No such file"):
        read_guard_config(str(tmp_path / "none.toml"))
    with pytest.raises(BadInput, match="directory"):
        read_guard_config(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"# one\n# tw\xf6\n")
    with pytest.raises(BadInput, match="line 2: not UTF-8"):
        read_guard_config(str(tmp_path / "latin.toml"))
    (tmp_path / "big.toml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(BadInput, match="more than 4 MiB"):
        read_guard_config(str(tmp_path / "big.toml"))
    with pytest.raises(BadInput, match=r"p\.toml, line"):
        config_in("a = " + "[" * 20_000, "p.toml")


@pytest.mark.parametrize("content", ["", "short", "two words that are long", "x" * 5_000, "ünïcödé-ünïcödé-ünïcödé"])
def test_a_file_without_a_token_is_refused_and_not_shown(content: str, tmp_path: Path) -> None:
    """What stands in it is never repeated."""
    path = tmp_path / "t"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        read_token(str(path))
    assert not content or content not in str(caught.value)


def test_addresses_to_listen_on() -> None:
    """Host and port, IPv6 in brackets, or a port alone on this machine."""
    assert listen_of("127.0.0.1:9790") == ("127.0.0.1", 9790)
    assert listen_of("[::1]:0") == ("::1", 0)
    assert listen_of(":9790") == ("127.0.0.1", 9790)
    assert [listen_of(text) for text in ("9790", "x:y", "x:70000", "a b:1", "")] == [None] * 5
    assert [is_loopback(host) for host in ("localhost", "::1", "127.8.9.1", "0.0.0.0", "127.0.0.1.evil.example", "::")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


@given(st.text(alphabet=st.sampled_from("[]=.#\"'\n abcengiurl_policy0159{},"), max_size=200))
def test_no_text_is_more_than_a_refusal(text: str) -> None:
    """Whatever stands in the file, the answer is a configuration or one line that names the file."""
    said = ""
    try:
        config_in(text, "p.toml")
    except BadInput as error:
        said = str(error)
    assert not said or (said.startswith("p.toml, line ") and "\n" not in said)


def test_places_are_found_in_tables_within_lists() -> None:
    """A table below a list belongs to its last entry, and what is not there is where its table is."""
    lines = KeyLines("a.b = 1\n[[x]]\ny = 1\n[x.z]\nq = 1\n[[x]]\n[x.z]\nq = 1\n")
    assert lines.of("a", "b") == 1
    assert lines.of("x", 0, "y") == 3
    assert lines.of("x", 0, "z", "q") == 5
    assert lines.of("x", 1, "z", "q") == 8
    assert lines.of("x", 1, "z", "nothing") == 7
    assert lines.of("nothing") == 1
