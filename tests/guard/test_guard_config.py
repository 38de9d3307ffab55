"""Guard's configuration: what it may hold, and that every mistake in it is one line with its place."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lab.write_guard_page import KEYS
from plimsoll.errors import BadInput
from plimsoll.guard.act.policy import ActPolicy, Hours
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.docker import DockerConfig
from plimsoll.guard.adapters.file_lock import FileLockConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.hooks import CommandBalancerConfig, ReadinessConfig, WebhookBalancerConfig
from plimsoll.guard.adapters.kubernetes import PodConfig
from plimsoll.guard.adapters.locks import EtcdLockConfig, LeaseLockConfig
from plimsoll.guard.adapters.own_process import OwnProcessConfig
from plimsoll.guard.adapters.pods import PodsConfig
from plimsoll.guard.adapters.systemd import SystemdConfig
from plimsoll.guard.config import ApiConfig, GuardConfig, Listen, config_in, files_of, is_loopback, listen_of, read_guard_config
from plimsoll.guard.config_reader import KeyLines, read_token
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.policy import THRESHOLDS
from plimsoll.guard.judge.tracker import Grade
from tests.each import cases, each, sure
from tests.options import guard_options

TOKEN = "a-token-that-is-long-enough"
ENGINE = "[[engine]]\nurl = 'http://x:1'\nname = 'a'\n"


def plan(folder: Path) -> None:
    """A plan as plimsoll plan --json prints it, in short."""
    body = {
        "kv": {"tokens": 16_000, "num_blocks": 1_000, "bytes_per_block": 1_000},
        "ledger": {"kv": {"low": 9e5, "high": 1.1e6}},
    }
    (folder / "plan.json").write_text(json.dumps(body), encoding="utf-8")


def test_the_whole_of_it_and_the_example_on_the_page(tmp_path: Path) -> None:
    """Everything that can be set is read, files beside it; what docs/guard.md shows can be used as it is."""
    for name in ("gate.token", "api.token"):
        (tmp_path / name).write_text(TOKEN + "\n", encoding="utf-8")
    plan(tmp_path)
    path = tmp_path / "plimsoll.toml"
    shutil.copy(Path(__file__).with_name("whole.toml"), path)
    found = read_guard_config(str(path))
    first, second = found.engines
    assert (first.name, first.token, first.canary_s) == ("first", TOKEN, 20.0)
    assert first.plan == pytest.approx((16_000.0, 14_400.0, 17_600.0))
    assert (second.name, second.token, second.canary_s, second.plan) == ("10.0.0.2:8443/base", None, None, None)
    assert found.discover.file_sd == (str(tmp_path / "engines" / "*.json"),)
    assert found.discover.kubernetes == PodsConfig("app=vllm", ("models",), 8000)
    assert (found.discover.every_s, found.notify.repeat_s) == (60.0, 300.0)
    assert found.notify.webhook == "http://127.0.0.1:9093/api/v2/alerts"
    assert found.api == ApiConfig(Listen("0.0.0.0", 9999), TOKEN, None, ("guard.example",))
    asked = guard_options(["--config", str(path)], {})
    assert asked.policy.every_s == 10.0
    assert asked.policy.number("dead", "refused") == 180.0
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
    assert (asked.config.api.token, asked.config.api.read_token) == (TOKEN, f"{TOKEN}-2")


def test_a_gate_is_where_it_is_said_and_a_secret_that_everybody_can_read_is_said_once(tmp_path: Path) -> None:
    """A socket, a key for test requests; of a file that cannot be read, and of a folder or other bytes, one line."""
    (engine,) = config_in("[[engine]]\nurl = 'http://x:1'\ngate = 'unix:/run/g.sock'", "p.toml").engines
    assert engine.gate_url == "unix:/run/g.sock"
    assert guard_options(["--engine", "http://x:1"], {}).config.engines[0].gate_url is None
    (tmp_path / "key").write_text("k", encoding="utf-8")
    found = config_in("[discover]\napi_key_file = 'key'\ncanary = true", str(tmp_path / "p.toml"))
    assert (found.discover.api_key, found.discover.canary_s) == ("k", 30.0)
    for name, mode in (("open", 0o644), ("shut", 0o640)):
        (tmp_path / name).write_text(TOKEN, encoding="utf-8")
        (tmp_path / name).chmod(mode)
    text = "[[engine]]\nurl = 'http://x:1'\ntoken_file = 'open'\napi_key_file = 'shut'\n[api]\ntoken_file = 'open'\n"
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    (said,) = read_guard_config(str(path)).warnings
    assert said.startswith(f"{tmp_path / 'open'} is a secret that every user of this machine can read")
    assert guard_options(["--config", str(path), "--token-file", str(tmp_path / "open")], {}).config.warnings == (said,)
    assert guard_options(["--engine", "http://x:1", "--token-file", str(tmp_path / "open")], {}).config.warnings == (said,)
    (tmp_path / "latin.toml").write_bytes(b"# one\n# tw\xf6\n")
    (tmp_path / "big.toml").write_bytes(b"#" * (5 << 20))
    for name, says in (("none.toml", "No such file"), ("", "directory"), ("latin.toml", "line 2: not UTF-8"),
                       ("big.toml", "more than 4 MiB")):  # fmt: skip
        with pytest.raises(BadInput, match=says):
            read_guard_config(str(tmp_path / name))
    with pytest.raises(BadInput, match=r"p\.toml, line"):
        config_in("a = " + "[" * 20_000, "p.toml")


MISTAKES: list[tuple[str, int, str]] = [
    *yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text(encoding="utf-8")),
    (f"[[engine]]\nurl = 'http://x:1'\ngate = 'unix:/{'x' * 120}'", 3, "of 107 letters at most"),
    (f"{ENGINE}balancer = {{haproxy = '/{'x' * 120}', backend = 'b', server = 'a'}}", 4, "107 letters at most"),
    (f"[act]\nlease = {'9' * 400}", 2, "must lie between"),
    (f"[act]\nlease = {'9' * 5000}", 2, "not TOML"),
]


@each(("text", "line", "says"), MISTAKES)
def test_every_mistake_has_its_line(text: str, line: int, says: str, tmp_path: Path) -> None:
    """The file, the line and what is wrong, in one line; who judges says what, and the file says where."""
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        guard_options(["--config", str(path)], {})
    message = str(caught.value)
    assert f"p.toml, line {line}: " in message, message
    assert says in message
    assert "\n" not in message


def test_every_number_of_the_policy_is_refused_on_its_own_line(tmp_path: Path) -> None:
    """Whichever number is wrong, it is that line which is named."""
    path = tmp_path / "p.toml"
    for knob in THRESHOLDS[::5]:  # a fifth of them is enough
        path.write_text(f"{ENGINE}[policy.{knob.kind}]\n\n{knob.name} = -1\n", encoding="utf-8")
        with pytest.raises(BadInput, match=rf"line 6: {knob.kind}.{knob.name} must lie"):
            guard_options(["--config", str(path)], {})


@pytest.mark.parametrize("content", ["", "short", "two words that are long", "x" * 5_000, "ünïcödé-ünïcödé-ünïcödé"])
def test_a_file_without_a_token_is_refused_and_not_shown(content: str, tmp_path: Path) -> None:
    """What stands in it is never repeated."""
    path = tmp_path / "t"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        read_token(str(path))
    assert not content or content not in str(caught.value)


def test_addresses_to_listen_on_and_places_in_tables_within_lists() -> None:
    """Host and port, IPv6 in brackets, or a port alone; a table below a list belongs to its last entry."""
    assert listen_of("127.0.0.1:9790") == ("127.0.0.1", 9790)
    assert listen_of("[::1]:0") == ("::1", 0)
    assert listen_of(":9790") == ("127.0.0.1", 9790)
    for text in ("9790", "x:y", "x:70000", "a b:1", ""):
        with pytest.raises(BadInput, match="HOST:PORT"):
            listen_of(text)
    assert [is_loopback(host) for host in ("localhost", "::1", "127.8.9.1", "0.0.0.0", "127.0.0.1.evil.example", "::")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    lines = KeyLines("a.b = 1\n[[x]]\ny = 1\n[x.z]\nq = 1\n[[x]]\n[x.z]\nq = 1\n")
    assert lines.of("a", "b") == 1
    assert lines.of("x", 0, "y") == 3
    assert lines.of("x", 0, "z", "q") == 5
    assert lines.of("x", 1, "z", "q") == 8
    assert lines.of("x", 1, "z", "nothing") == 7
    assert lines.of("nothing") == 1


def read(text: str, folder: Path = Path("/etc/p")) -> GuardConfig:
    return config_in(text, str(folder / "p.toml"))


def engine(line: str, folder: Path = Path("/etc/p")) -> EngineConfig:
    """What one more line says of an engine."""
    return read(ENGINE + line, folder).engines[0]


def test_nothing_need_be_set_and_every_key_of_act_reaches_the_policy() -> None:
    """An empty [act] is what guard does by itself; with a KV connector or several machines it keeps its hands off."""
    found = read("")
    assert (found.engines, found.notify.webhook, found.api, found.act, found.lock) == ((), None, ApiConfig(), None, None)
    assert (found.api.host, found.api.port) == ("127.0.0.1", 9790)
    assert read("[act]\n").act == ActPolicy()
    assert "2 machines" in engine("nodes = 2").only_observed
    assert "KV connector" in engine("kv_connector = true").only_observed
    assert engine("kv_connector = false\nnodes = 1").only_observed == ""
    text = Path(__file__).with_name("act.toml").read_text(encoding="utf-8")
    act = sure(read(text).act)
    assert set(tomllib.loads(text)["act"]) == {key.name for key in KEYS if key.table == "act"}, "this test writes every key"
    policy = replace(act, journal=None, evidence=None)
    assert policy == ActPolicy(
        (Grade.SHED, Grade.RESTART), 1, 3, 2, 9, 600.0, 21_600.0, 2, 0.7, (Hours(1_320, 360), Hours(720, 810)),
        broken_any_time=True, may_be_last=True, rollout_s=1_200.0, drain_within_s=600.0, lease_s=30.0, stragglers="stop",
        stop_within_s=180.0, gone_within_s=90.0, start_still_s=900.0, start_within_s=10_800.0, probation_s=300.0,
        shed_wait_s=10.0, shed_lease_s=90.0, approve=(Grade.RESTART,), approve_within_s=600.0,
    )  # fmt: skip
    usual = ActPolicy()
    same = [field.name for field in fields(act) if getattr(act, field.name) == getattr(usual, field.name)]
    assert same == ["timezone"], "and none of the others as it is by itself"
    assert (act.journal, act.evidence) == ("/etc/p/state/guard.journal", "/var/evidence")


def test_three_locks_balancers_and_restarters(tmp_path: Path) -> None:
    """Each way that docs/guard-config.md names; no secret is in what is printed of one."""
    (tmp_path / "pw").write_text("hunter2", encoding="utf-8")
    assert read("[lock]\nfile = 'l'").lock == FileLockConfig("/etc/p/l")
    assert read("[lock]\nlease = 'guard'\nnamespace = 'models'\nttl = '20s'").lock == LeaseLockConfig("guard", "models", 20)
    text = "[lock]\netcd = ['http://a:1', 'https://b:2']\nkey = 'k'\nttl = 60\nuser = 'u'\npassword_file = 'pw'\nca_file = 'ca'"
    found = read(text, tmp_path).lock
    assert found == EtcdLockConfig(("http://a:1", "https://b:2"), "k", 60, "u", "hunter2", str(tmp_path / "ca"))
    assert "hunter2" not in repr(found)
    (tmp_path / "t").write_text("secret", encoding="utf-8")
    haproxy = "balancer = {haproxy = '/run/h.sock', backend = ['llm', 'chat'], server = 's1', may_be_last = true}"
    assert engine(haproxy).balancer == HaproxyConfig("/run/h.sock", ("llm", "chat"), "s1", may_be_last=True)
    assert engine("balancer = {command = ['lb', '{verb}']}").balancer == CommandBalancerConfig(("lb", "{verb}"))
    webhook = engine("balancer = {webhook = 'http://lb:1/x', token_file = 't'}", tmp_path).balancer
    assert webhook == WebhookBalancerConfig("http://lb:1/x", "secret")
    assert "secret" not in repr(webhook)
    assert engine("balancer = 'readiness'").balancer == ReadinessConfig()
    assert engine("restart = {systemd = 'vllm@a.service', user = true}").restart == SystemdConfig(
        "vllm@a.service", is_user=True
    )
    commands = engine("restart = {stop = ['x'], start = ['y', '1'], is_running = ['z']}").restart
    assert commands == CommandRestarterConfig(("x",), ("y", "1"), ("z",))
    assert engine("restart = {docker = 'vllm'}").restart == DockerConfig("vllm", "/var/run/docker.sock")
    assert engine("restart = {kubernetes = 'vllm-0', namespace = 'm', selector = 'app=vllm'}").restart == PodConfig(
        "vllm-0", "m", "app=vllm"
    )
    assert engine("group = 'big'\nlog = 'a.log'\nnodes = 2") == EngineConfig(
        "a", "http://x:1", group="big", log="/etc/p/a.log", nodes=2
    )
    assert engine("") == EngineConfig("a", "http://x:1")


def test_where_files_lie() -> None:
    """Where the configuration says, else systemd's folder, else this user's own; none for nobody."""
    own = read("[own]\nlog = 'e.log'").own
    assert own == OwnProcessConfig("/etc/p/e.log")
    system = files_of(None, OwnProcessConfig(), {"STATE_DIRECTORY": "/var/lib/plimsoll:/var/lib/other", "HOME": "/home/u"})
    assert system is not None
    assert [str(one) for one in system] == [
        f"/var/lib/plimsoll/{name}" for name in ("guard.journal", "evidence", "fleet.lock", "engine.log", "engine.state")
    ]
    user = sure(files_of(ActPolicy(evidence="/e"), own, {"XDG_STATE_HOME": "/s", "HOME": "/home/u"}))
    assert [str(one) for one in user] == [
        "/s/plimsoll/guard.journal", "/e", "/s/plimsoll/fleet.lock", "/etc/p/e.log", "/s/plimsoll/engine.state"
    ]  # fmt: skip
    assert str((files_of(None, own, {"HOME": "/home/u"}) or system).journal) == "/home/u/.local/state/plimsoll/guard.journal"
    assert str((files_of(ActPolicy(journal="/j/x"), own, {}) or system).lock) == "/j/fleet.lock"
    assert files_of(None, own, {"HOME": ""}) is None


@each("about", [about for about in KEYS if about.table == "act" and about.high], ids=lambda about: about.name)
def test_every_bound_of_act_holds(about: object) -> None:
    """Just outside is refused on its own line, at the bound it is taken."""
    one = next(key for key in KEYS if key is about)
    step = 1 if one.kind == "count" else 0.01
    outside = [one.high + step] + ([one.low - step] if one.kind == "count" or one.low else [])
    for value in outside:
        shown = int(value) if one.kind == "count" else value
        with pytest.raises(BadInput, match=rf"p\.toml, line 3: {one.name} "):
            read(f"[act]\n\n{one.name} = {shown}")
    wide = "longest_backoff = '1d'\nstart_within = '1d'\nbackoff = 30\nstart_still = 30\nrestarts_per_hour = 0\n"
    wide += "fleet_restarts_per_hour = 0\nrestarts_per_day = 100\nfleet_restarts_per_day = 500\n"
    rest = "".join(line + "\n" for line in wide.splitlines() if line.split(" ", 1)[0] != one.name)
    for value in (one.low, one.high):
        assert read(f"[act]\n{rest}{one.name} = {int(value) if one.kind == 'count' else value}").act is not None


VALUES = st.sampled_from(
    ["1", "-1", "0.5", "nan", "inf", "true", "'x'", "''", "'~x/y'", "'30s'", "'22:00-06:00'", "[]", "['a']", "[1]", "{}",
     "{haproxy = '/x', backend = 'b', server = 's'}", "{stop = [''], start = ['x'], is_running = []}", "1979-05-27", "[[]]",
     "99999999999999999999999999", "{systemd = 'a.service', user = 1}", "{webhook = 'http://x:1'}", "'http://x:1'",
     "{docker = 1}", "'readiness'"]
)  # fmt: skip


def refused_at_most(text: str) -> None:
    """It is a configuration, or is refused in one line that names the file and the line."""
    said = ""
    try:
        read(text)
    except BadInput as error:
        said = str(error)
    assert not said or (said.startswith("/etc/p/p.toml, line ") and "\n" not in said), said


@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=8))
def test_no_text_is_more_than_a_refusal(rows: list[tuple[object, str]]) -> None:
    """Whatever stands under whichever key, the answer is a configuration or one line that names the file and the line."""
    tables: dict[str, dict[str, str]] = {"engine": {"url": "'http://x:1'"}}
    for about, value in rows:
        one = next(key for key in KEYS if key is about)
        tables.setdefault(one.table, {})[one.name] = value
    heads = {"engine": "[[engine]]"}
    text = "".join(
        f"{heads.get(table, f'[{table}]')}\n" + "".join(f"{name} = {value}\n" for name, value in row.items())
        for table, row in tables.items()
    )
    refused_at_most(text)


@given(st.text(alphabet=st.sampled_from("[]=.#\"'\n abcengiurlkowt_policy0159{},~"), max_size=120))
def test_no_letters_are_more_than_a_refusal(text: str) -> None:
    """The same for any letters at all, also below the headers."""
    for head in ("", "[act]\n", "[lock]\n", ENGINE, "[own]\n"):
        refused_at_most(head + text)


@each(("second", "wanted"), cases("guard", "copied lines"))
def test_a_copied_line_is_refused_with_both_lines(second: str, wanted: str) -> None:
    """Two engines with one address, restart or server cannot be meant: the healthy one would be stopped for the dead one."""
    first = f"{ENGINE}restart = {{systemd = 'a.service'}}\nbalancer = {{haproxy = '/run/h', backend = 'llm', server = 'a'}}\n"
    with pytest.raises(BadInput, match=r"p\.toml, line \d+: .*" + wanted):
        read(f"{first}[[engine]]\n{second}\n")


def test_what_can_be_shared_may_be_shared() -> None:
    """A webhook and a command are told which engine; two servers of one backend are two."""
    shared = "balancer = {webhook = 'http://w:1'}"
    other = "[[engine]]\nurl = 'http://y:1'\n"
    assert len(read(f"{ENGINE}{shared}\n{other}{shared}\n").engines) == 2
    servers = [f"balancer = {{haproxy = '/run/h', backend = 'llm', server = '{name}'}}\n" for name in "ab"]
    assert len(read(f"{ENGINE}{servers[0]}{other}{servers[1]}").engines) == 2
