"""What guard's configuration says of acting: what may stand in it, its bounds, and the line of every mistake."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.act.policy import ActPolicy, Hours
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.docker import DockerConfig
from plimsoll.guard.adapters.etcd_lock import EtcdLockConfig
from plimsoll.guard.adapters.file_lock import FileLockConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.hooks import CommandBalancerConfig, ReadinessConfig, WebhookBalancerConfig
from plimsoll.guard.adapters.kubernetes import PodConfig
from plimsoll.guard.adapters.lease_lock import LeaseLockConfig
from plimsoll.guard.adapters.own_process import OwnProcessConfig
from plimsoll.guard.adapters.systemd import SystemdConfig
from plimsoll.guard.config import KEYS, GuardConfig, config_in, files_of, keys
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.tracker import Grade
from tests.each import each

ENGINE = "[[engine]]\nurl = 'http://x:1'\nname = 'a'\n"


def read(text: str, folder: Path = Path("/etc/p")) -> GuardConfig:
    return config_in(text, str(folder / "p.toml"))


def engine(line: str, folder: Path = Path("/etc/p")) -> EngineConfig:
    """What one more line says of an engine."""
    return read(ENGINE + line, folder).engines[0]


def test_defaults_are_those_of_the_policy() -> None:
    """An empty [act] is what guard does by itself; without one nothing is said of acting."""
    assert read("").act is None
    assert read("[act]\n").act == ActPolicy()


def test_every_key_of_act_reaches_the_policy() -> None:
    """What is written there is what guard does by."""
    text = """[act]
rungs = ["shed", "restart"]
restarts_per_hour = 1
restarts_per_day = 3
fleet_restarts_per_hour = 2
fleet_restarts_per_day = 9
backoff = "10m"
longest_backoff = "6h"
most_away = 2
carries = "70%"
hours = ["22:00-06:00", "12:00 - 13:30"]
timezone = "UTC"
broken_any_time = true
may_be_last = true
rollout = "20m"
drain_within = "10m"
lease = "30s"
stragglers = "stop"
stop_within = "3m"
gone_within = "90s"
start_still = "15m"
start_within = "3h"
probation = "5m"
shed_wait = "10s"
shed_lease = "90s"
approve = ["restart"]
approve_within = "10m"
journal = "state/guard.journal"
evidence = "/var/evidence"
"""
    act = read(text).act
    assert act is not None
    assert set(tomllib.loads(text)["act"]) == {key.name for key in keys("act")}, "this test writes every key"
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


def test_three_locks(tmp_path: Path) -> None:
    """A file, etcd, or a Lease; no secret is in what is printed of one."""
    (tmp_path / "pw").write_text("hunter2", encoding="utf-8")
    assert read("").lock is None
    assert read("[lock]\nfile = 'l'").lock == FileLockConfig("/etc/p/l")
    assert read("[lock]\nlease = 'guard'\nnamespace = 'models'\nttl = '20s'").lock == LeaseLockConfig("guard", "models", 20)
    text = "[lock]\netcd = ['http://a:1', 'https://b:2']\nkey = 'k'\nttl = 60\nuser = 'u'\npassword_file = 'pw'\nca_file = 'ca'"
    found = read(text, tmp_path).lock
    assert found == EtcdLockConfig(("http://a:1", "https://b:2"), "k", 60, "u", "hunter2", str(tmp_path / "ca"))
    assert "hunter2" not in repr(found)


def test_balancers_and_restarters(tmp_path: Path) -> None:
    """Each way that docs/guard-config.md names."""
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


def test_what_is_only_observed() -> None:
    """A KV connector or several machines: guard keeps its hands off, and says why."""
    assert "2 machines" in engine("nodes = 2").only_observed
    assert "KV connector" in engine("kv_connector = true").only_observed
    assert engine("kv_connector = false\nnodes = 1").only_observed == ""


def test_where_files_lie() -> None:
    """Where the configuration says, else systemd's folder, else this user's own; none for nobody."""
    own = read("[own]\nlog = 'e.log'").own
    assert own == OwnProcessConfig("/etc/p/e.log")
    system = files_of(None, OwnProcessConfig(), {"STATE_DIRECTORY": "/var/lib/plimsoll:/var/lib/other", "HOME": "/home/u"})
    assert system is not None
    assert [str(one) for one in system] == [
        f"/var/lib/plimsoll/{name}" for name in ("guard.journal", "evidence", "fleet.lock", "engine.log", "engine.state")
    ]
    user = files_of(ActPolicy(evidence="/e"), own, {"XDG_STATE_HOME": "/s", "HOME": "/home/u"})
    assert user is not None
    assert [str(one) for one in user] == [
        "/s/plimsoll/guard.journal", "/e", "/s/plimsoll/fleet.lock", "/etc/p/e.log", "/s/plimsoll/engine.state"
    ]  # fmt: skip
    assert str((files_of(None, own, {"HOME": "/home/u"}) or system).journal) == "/home/u/.local/state/plimsoll/guard.journal"
    assert str((files_of(ActPolicy(journal="/j/x"), own, {}) or system).lock) == "/j/fleet.lock"
    assert files_of(None, own, {"HOME": ""}) is None


@each("about", [about for about in keys("act") if about.high], ids=lambda about: about.name)
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


@each(
    ("text", "line", "says"),
    [
        ("act = 3", 1, "[act] is a table"),
        ("[act]\nlease = '1s'", 2, "lease must lie between 15 and 600 s"),
        ("[act]\nrestarts_per_hour = 1000", 2, "a whole number from 0 to 20"),
        ("[act]\nrestarts_per_hour = true", 2, "a whole number"),
        ("[act]\nrestarts = 3", 2, "[act] has no 'restarts'"),
        ("[act]\nrungs = ['sleep']", 2, "rungs has no 'sleep'"),
        ("[act]\nrungs = 3", 2, "a text or a list"),
        ("[act]\ncarries = 1.2", 2, "a share from 0.1 to 1"),
        ("[act]\ncarries = true", 2, "a share from 0.1 to 1"),
        ("[act]\ncarries = '200%'", 2, "a share from 0.1 to 1"),
        ("[act]\nhours = ['22-6']", 2, "is no time of day"),
        ("[act]\nhours = ['25:00-06:00']", 2, "is no time of day"),
        ("[act]\nhours = ['06:00-06:00']", 2, "is no time of day"),
        ("[act]\n\ntimezone = 'Middle/Earth'", 3, "is no time zone"),
        ("[act]\ntimezone = '../../etc/passwd'", 2, "is no time zone"),
        ("[act]\ntimezone = 'Europe'", 2, "is no time zone"),
        ("[act]\ntimezone = ''", 2, "is no time zone"),
        ("[act]\nmay_be_last = 1", 2, "true or false"),
        ("[act]\nstragglers = 'kill'", 2, "stragglers has no 'kill'"),
        ("[act]\nbackoff = '5h'", 2, "longest_backoff must not be less than backoff"),
        ("[act]\nbackoff = '5h'\nlongest_backoff = '4h'", 3, "longest_backoff must not be less"),
        ("[act]\nrestarts_per_hour = 7", 2, "restarts_per_day must not be less than restarts_per_hour"),
        ("[act]\njournal = ''", 2, "is the path of a file"),
        ("[act]\njournal = '~nobody-of-that-name/x'", 2, "there is no such user"),
        (f"[act]\nlease = {'9' * 400}", 2, "must lie between"),
        (f"[act]\nlease = {'9' * 5000}", 2, "not TOML"),
        ("[lock]\n", 1, "exactly one of: file, etcd, lease"),
        ("[lock]\nfile = 'x'\nlease = 'y'", 1, "exactly one of"),
        ("[lock]\nfile = 'x'\nttl = '30s'", 3, "ttl does not go with file"),
        ("[lock]\nlease = 'A_B'", 2, "is not the name of a Lease"),
        ("[lock]\netcd = []", 2, "etcd needs an address"),
        ("[lock]\netcd = 'ftp://x'", 2, "http://HOST:PORT"),
        ("[lock]\netcd = 'http://x:1'\nuser = 'u'", 1, "user and password_file go together"),
        ("[lock]\netcd = 'http://x:1'\nttl = '1s'", 3, "ttl must lie between"),
        ("[own]\nlog = 3", 2, "a text on one line"),
        (ENGINE + "balancer = 'haproxy'", 4, 'balancer is "readiness", or a table'),
        (ENGINE + "balancer = {}", 4, "balancer is exactly one of: haproxy, command, webhook"),
        (ENGINE + "balancer = {haproxy = '/x', server = 'a'}", 4, '[engine.balancer] needs its backend = "llm"'),
        (ENGINE + "balancer = {haproxy = '/x', backend = 'a b', server = 'a'}", 4, "is not the name of a backend"),
        (ENGINE + "balancer = {haproxy = '/x', backend = [], server = 'a'}", 4, "backend is one at least"),
        (ENGINE + f"balancer = {{haproxy = '/{'x' * 120}', backend = 'b', server = 'a'}}", 4, "107 letters at most"),
        (ENGINE + "balancer = {command = 'lb {verb}'}", 4, "a command as a list of words"),
        (ENGINE + "balancer = {command = ['']}", 4, "the first word is the program"),
        (ENGINE + "balancer = {command = ['x'], server = 'a'}", 4, "server does not go with command"),
        (ENGINE + "[engine.balancer]\nwebhook = 'http://x:1'\ntoken_file = 'nowhere'", 6, "No such file"),
        (ENGINE + "restart = 'systemd'", 4, "restart is a table"),
        (ENGINE + "restart = {systemd = 'vllm'}", 4, "is not the name of a service"),
        (ENGINE + "restart = {systemd = '-H.service'}", 4, "is not the name of a service"),
        (
            ENGINE + "[engine.restart]\nstop = ['x']\nis_running = ['y']",
            4,
            '[engine.restart] needs its start = ["ctl", "start"]',
        ),
        (ENGINE + "restart = {docker = '../x'}", 4, "is not the name of a container"),
        (ENGINE + "restart = {kubernetes = 'A'}", 4, "is not the name of a pod"),
        (ENGINE + "restart = {systemd = 'a.service', docker = 'b'}", 4, "restart is exactly one of"),
        (ENGINE + "nodes = 0", 4, "a whole number from 1"),
        (ENGINE + "kv_connector = 'yes'", 4, "true or false"),
    ],
)
def test_every_mistake_has_its_line(text: str, line: int, says: str) -> None:
    """The file, the line and what is wrong, in one line."""
    with pytest.raises(BadInput) as caught:
        read(text)
    message = str(caught.value)
    assert f"p.toml, line {line}: " in message, message
    assert says in message
    assert "\n" not in message


VALUES = st.sampled_from(
    ["1", "-1", "0.5", "nan", "inf", "true", "'x'", "''", "'~x/y'", "'30s'", "'22:00-06:00'", "[]", "['a']", "[1]", "{}",
     "{haproxy = '/x', backend = 'b', server = 's'}", "{stop = [''], start = ['x'], is_running = []}", "1979-05-27", "[[]]",
     "99999999999999999999999999", "{systemd = 'a.service', user = 1}", "{webhook = 'http://x:1'}", "'http://x:1'",
     "{docker = 1}", "'readiness'"]
)  # fmt: skip


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
    said = ""
    try:
        read(text)
    except BadInput as error:
        said = str(error)
    assert not said or (said.startswith("/etc/p/p.toml, line ") and "\n" not in said), said


@given(st.text(alphabet=st.sampled_from("[]=.#\"'\n abcgkowl_act0159{},~"), max_size=120))
def test_no_letters_are_more_than_a_refusal(text: str) -> None:
    """The same for any letters at all below the headers."""
    for head in ("[act]\n", "[lock]\n", ENGINE, "[own]\n"):
        said = ""
        try:
            read(head + text)
        except BadInput as error:
            said = str(error)
        assert not said or (said.startswith("/etc/p/p.toml, line ") and "\n" not in said), said


SAME = [
    ("url = 'http://x:1/'\nname = 'b'", "the same address as in line 2"),
    ("url = 'http://y:1'\nrestart = {systemd = 'a.service'}", "the same restart as in line 4"),
    (
        "url = 'http://y:1'\nbalancer = {haproxy = '/run/h', backend = ['x', 'llm'], server = 'a'}",
        "balancer server as in line 5",
    ),
    ("url = 'http://y:1'\nrestart = {stop = ['x'], start = ['x'], is_running = ['y']}", "stop and start are the same command"),
]


@each(("second", "wanted"), SAME)
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
