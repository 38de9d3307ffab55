"""`plimsoll guard` as a user meets it: what it takes, what it says of stand-ins, its API, its notifications, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.cli.guard import GuardCommandOptions
from plimsoll.errors import BadInput
from plimsoll.guard.api.api import metrics_page
from plimsoll.guard.api.openapi import document
from plimsoll.guard.judge.judge import QUESTIONS
from plimsoll.guard.judge.policy import GRADES
from plimsoll.launch.options import options_of
from tests.cli.answers import shell
from tests.each import cases, each
from tests.fakes import TOKEN as STANDIN_TOKEN
from tests.guard.daemon.guards import TOKEN, guarding
from tests.net.page_server import PAGE, Handler, receiving, serving
from tests.options import guard_options
from tests.standin.servers import Server, standin

QUICK = "[policy.dead]\nfor = 0\nclear = 0\n"
PATHS = {"/engines": "Engines", "/conditions": "Conditions", "/findings": "Findings", "/history": "History"}


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def kill_engine(server: Server) -> None:
    """Its engine dies at its next step; the API server lives on and says so."""
    server.ask("POST", "/standin/faults", {"kind": "oom"}, authorization=f"Bearer {STANDIN_TOKEN}")
    server.ask("POST", "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2})


def config(folder: Path, text: str) -> str:
    path = folder / "plimsoll.toml"
    path.write_text('[api]\nlisten = "127.0.0.1:0"\n' + text, encoding="utf-8")
    return str(path)


def test_engines_may_be_many_and_are_watched_once() -> None:
    """--engine is taken as often as it is given; the gates' token comes from the environment, and no canary unless asked."""
    asked = guard_options(
        ["--engine", "http://a:1", "--engine=http://b:2/", "--engine", "http://a:1"], {"PLIMSOLL_TOKEN": "t" * 16}
    )
    assert [(one.name, one.token, one.canary_s) for one in asked.config.engines] == [
        ("a:1", "t" * 16, None),
        ("b:2", "t" * 16, None),
    ]
    assert [one.canary_s for one in guard_options(["--engine", "http://a:1", "--canary"], {}).config.engines] == [30.0]
    with pytest.raises(Exception, match="PLIMSOLL_GUARD_TOKEN"):
        guard_options(["--engine", "http://a:1"], {"PLIMSOLL_GUARD_TOKEN": "short"})


@pytest.mark.real
def test_a_healthy_engine_is_one_sentence_and_nobody_there_is_exit_code_3(tmp_path: Path) -> None:
    """No configuration, no flag on the server: it answers, exit code 0; of nobody it says so once, and that is no finding."""
    with standin() as server, guarding(tmp_path, "--engine", url(server), "--looks", "4") as guard:
        assert guard.process.wait(60) == 0
        assert len(guard.said) == 1, guard.said
        assert f"127.0.0.1:{server.port}: answers, vLLM 0.32.0" in guard.said[0]
        assert guard.complained == []
    assert list((tmp_path / "plimsoll").iterdir()) == [], "the token that was drawn is taken away again"
    with guarding(tmp_path, "--engine", "http://127.0.0.1:9", "--looks", "3", "--json") as guard:
        assert guard.process.wait(60) == 3
        (line,) = guard.said
        told = json.loads(line)
        assert (told["schema"], told["what"], told["code"]) == ("plimsoll.guard/1", "unreachable", None)
        assert guard.complains("no engine answered")


@pytest.mark.real
def test_a_dead_engine_is_said_shown_and_notified_and_so_is_its_end(tmp_path: Path) -> None:
    """One sentence, a finding with its remedy, one alert in Alertmanager's form; the alert that ends is the one that began."""
    health = [200]

    def act(ask: Handler) -> None:
        is_page = ask.path == "/metrics"
        ask.answer(PAGE if is_page else b"", 200 if is_page else health[0] if ask.path == "/health" else 404)

    with serving(act) as engine, receiving() as receiver:
        text = f"{QUICK}[notify]\nwebhook = '{receiver.url}'\n[[engine]]\nurl = 'http://{engine.host}'\nname = 'one'\n"
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears("one: answers")
            health[0] = 503
            line = guard.hears("engine.dead")
            assert "one: the engine is dead (engine.dead): its /health reports a dead engine" in line
            (found,) = guard.json("/findings")["findings"]
            assert (found["engine"], found["code"], found["severity"]) == ("one", "engine.dead", "critical")
            assert found["remedy"]
            time.sleep(3)  # three looks later nothing new is said
            assert len(guard.said) == 2, guard.said
            assert guard.json("/engines/one")["engine"]["holds"] == ["dead"]
            health[0] = 200
            assert "one: recovered: engine.dead cleared after " in guard.hears("cleared after")
            assert guard.stop() == 0
    # On a busy machine one may be sent twice: a receiver that is slow to say that it has it is told again.
    alerts = [alert for _, _, body in receiver.got for alert in body if alert["labels"]["alertname"] == "engine.dead"]
    assert len(alerts) >= 2
    began, ended = alerts[0], alerts[-1]
    assert began["labels"] == {"alertname": "engine.dead", "engine": "one", "severity": "critical", "condition": "dead"}
    assert began["annotations"]["explain"] == "plimsoll doctor --explain engine.dead"
    assert began["startsAt"] < began["endsAt"]
    assert (ended["labels"], ended["startsAt"]) == (began["labels"], began["startsAt"])
    assert ended["endsAt"] < began["endsAt"]


def holds(schema: str, answer: Any) -> None:
    """The answer is what the document says."""
    whole = document("x")
    jsonschema.Draft202012Validator({**whole, "$ref": f"#/components/schemas/{schema}"}).validate(answer)


def test_the_api_answers_as_its_document_says(tmp_path: Path) -> None:
    """Every path, with a healthy engine, one that is not there, and one that is dead; the document is served, too."""
    with standin() as server, standin() as dead:
        text = QUICK + "".join(
            f"[[engine]]\nurl = '{where}'\nname = '{name}'\n"
            for name, where in (("a/b c", url(server)), ("gone", "http://127.0.0.1:9"), ("dead", url(dead)))
        )
        kill_engine(dead)
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears("engine.dead")
            assert json.loads(guard.get("/openapi.json")[1])["paths"] == document("x")["paths"]
            for path, schema in PATHS.items():
                holds(schema, guard.json(path))
            for name in ("a%2Fb%20c", "a/b%20c", "gone", "dead"):
                holds("OneEngine", guard.json(f"/engines/{name}"))
            assert len(guard.json("/conditions")["conditions"]) == 3 * len(QUESTIONS)
            assert {row["kind"] for row in guard.json("/conditions?engine=dead&status=true")["conditions"]} == {"dead"}
            assert {row["status"] for row in guard.json("/conditions?engine=gone")["conditions"] if row["kind"] in GRADES} == {
                "unknown"
            }
            assert len(guard.json("/history?limit=1")["changes"]) == 1
            assert {row["engine"] for row in guard.json("/history?engine=gone")["changes"]} == {"gone"}
            for path, status in (("/history?limit=x", 400), ("/engines/none", 404), ("/nowhere", 404), ("/engines/", 404)):
                assert guard.get(path)[0] == status
                holds("Error", json.loads(guard.get(path)[1]))
            assert guard.get("/healthz", authorization="")[0] == 200
            assert guard.get("/engines", authorization="")[0] == 401
            assert guard.get("/engines", host="evil.example")[0] == 421
            assert guard.stop() == 0


@pytest.mark.real
def test_its_own_page_of_metrics(tmp_path: Path) -> None:
    """What Prometheus's own parser reads: looks, failures, ages, and each condition as 0, 1 or NaN."""
    with standin() as server:
        words = ("--engine", url(server), "--engine", "http://127.0.0.1:9")
        with guarding(tmp_path, *words, PLIMSOLL_GUARD_TOKEN=TOKEN, XDG_RUNTIME_DIR=str(tmp_path)) as guard:
            guard.hears("answers, vLLM")
            guard.hears("connection refused")
            # A token that was given is left nowhere: the port is found by its listening socket.
            where = f"http://127.0.0.1:{listening_port(guard.process.pid)}/metrics"
            asked = urllib.request.Request(where, headers={"authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(asked, timeout=20) as answer:
                page = answer.read().decode()
            guard.stop()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {
        "plimsoll_guard_looks", "plimsoll_guard_look_failures", "plimsoll_guard_look_age_seconds", "plimsoll_guard_condition",
        "plimsoll_guard_notifications", "plimsoll_guard_engines", "plimsoll_guard_build_info",
    } <= set(families)  # fmt: skip
    rows = {(s.labels["engine"], s.labels["condition"]): s.value for s in families["plimsoll_guard_condition"].samples}
    assert rows[f"127.0.0.1:{server.port}", "dead"] == 0.0
    assert rows["127.0.0.1:9", "dead"] != rows["127.0.0.1:9", "dead"], "NaN: it is not known"
    assert not any(value == 1.0 for value in rows.values())


def listening_port(pid: int) -> int:
    """The port that a process listens on, by the kernel's own tables."""
    inodes = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
            return int(parts[1].partition(":")[2], 16)
    raise AssertionError("it does not listen")


@pytest.mark.real
def test_engines_come_and_go_with_their_list(tmp_path: Path) -> None:
    """file_sd is read again: a new target is watched, one that is gone is not; a broken list changes nothing."""
    listed = tmp_path / "engines.json"
    with standin() as first, standin() as second:
        listed.write_text(json.dumps([{"targets": [f"127.0.0.1:{first.port}"]}]), encoding="utf-8")
        text = "[discover]\nfile_sd = 'engines.json'\nevery = '1s'\n"
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears(f"127.0.0.1:{first.port}: answers")
            listed.write_text("[{", encoding="utf-8")
            assert "line 1: not JSON; what it said before stays" in guard.complains("not JSON")
            assert len(guard.json("/engines")["engines"]) == 1
            assert "not JSON" in guard.json("/engines")["troubles"][0]["text"]
            listed.write_text(json.dumps([{"targets": [f"127.0.0.1:{second.port}"]}]), encoding="utf-8")
            guard.hears(f"127.0.0.1:{second.port}: now watched")
            guard.hears(f"127.0.0.1:{second.port}: answers")
            assert guard.complains("recovered").endswith("engines.json: recovered")
            assert guard.json("/engines")["troubles"] == []
            guard.hears(f"127.0.0.1:{first.port}: no longer in the engine list")
            assert [one["name"] for one in guard.json("/engines")["engines"]] == [f"127.0.0.1:{second.port}"]
            assert guard.stop() == 0


@pytest.mark.real
def test_systemd_hears_that_it_lives(tmp_path: Path) -> None:
    """Ready, then alive again and again with a line of status, then stopping."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, standin() as server:
        systemd.bind(path)
        systemd.settimeout(30)
        with guarding(tmp_path, "--engine", url(server), NOTIFY_SOCKET=path, WATCHDOG_USEC="1000000") as guard:
            assert systemd.recv(4096).startswith(b"READY=1\nSTATUS=1 engine")
            beats = [systemd.recv(4096).decode() for _ in range(3)]
            assert all(beat.startswith("WATCHDOG=1\nSTATUS=1 engine") for beat in beats)
            assert beats[-1].endswith("all healthy")
            assert guard.stop() == 0
        systemd.setblocking(False)
        heard = b""
        while b"STOPPING" not in heard:
            heard = systemd.recv(4096)
        assert heard == b"STOPPING=1"


@pytest.mark.real
def test_a_place_that_is_taken(tmp_path: Path) -> None:
    """An API that was asked for and cannot be had is exit code 3."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["--engine", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll", "guard", *words], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 3
    assert "cannot serve the API" in done.stderr
    assert "perhaps by another guard (see plimsoll guardctl status)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "plimsoll").exists(), "the token of whoever has the place is left alone"


@pytest.mark.real
def test_a_person_is_told_where_the_page_is(tmp_path: Path) -> None:
    """On a terminal: its address and the file with the token. Who reads a pipe or a journal is told nothing of it."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "plimsoll", "guard", "--engine", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=theirs, env=environ) as guard:
        heard = b""
        while b"\n" not in heard:
            heard += os.read(ours, 4096)
        guard.terminate()
    os.close(ours)
    os.close(theirs)
    assert re.match(rb"plimsoll: page: http://127\.0\.0\.1:\d+/ with the token in ", heard), heard
    with guarding(tmp_path, "--engine", "http://127.0.0.1:9") as quiet:
        quiet.hears("connection refused")
        assert quiet.complained == []


@pytest.mark.real
def test_sighup_and_a_reader_that_goes_away_end_it(tmp_path: Path) -> None:
    """What is in progress is taken back first: an unhandled SIGHUP would leave an engine drained. `| head -1` ends quietly."""
    with standin() as server, guarding(tmp_path, "--engine", url(server)) as guard:
        guard.hears("answers")
        guard.process.send_signal(signal.SIGHUP)
        assert guard.process.wait(20) == 0
    done = shell("plimsoll guard --no-api --every 1s --engine http://127.0.0.1:9 --looks 3 --json | head -c 1")
    assert (done.stdout, "Traceback" in done.stderr) == ("{", False)


def test_the_page_names_all_there_is() -> None:
    """Every option of the command, every path of the API and every metric stands in docs/guard.md."""
    page = (Path(__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    for option in options_of(GuardCommandOptions).values():
        assert f"`{option.name}" in page, option
    for path in document("x")["paths"]:
        assert path.replace("{name}", "NAME").replace("{id}", "ID") in page, path
    text = metrics_page(
        [], version="x", started_unix_s=0.0, notifications={"sent": 1, "waiting": 0}, told=0, mistakes={"x": 1}
    )  # fmt: skip
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        assert f"`{name}`" in page, name


# What it is told of acting: --act, [act], and a server of its own behind --.
@each(("words", "where"), cases("cli", "a_server_of_its_own_is_watched_where_its_command_says"))
def test_a_server_of_its_own_is_watched_where_its_command_says(words: str, where: str) -> None:
    """Behind -- nothing is guard's own; the address is that of --host and --port, and a wildcard is this machine."""
    asked = guard_options(["--act", "--", *words.split(), "--act", "--engine", "http://not.ours"], {"PLIMSOLL_TOKEN": "t" * 16})
    (engine,) = asked.config.engines
    assert (engine.url, asked.own, engine.token, engine.only_observed) == (where, engine.name, "t" * 16, "")
    assert asked.command == (*words.split(), "--act", "--engine", "http://not.ours")
    assert asked.is_acting


def test_a_server_of_its_own_that_guard_may_not_touch() -> None:
    """A KV connector or a second machine in the command is enough: it is only observed."""
    for words in ("--kv-transfer-config {}", "--nnodes 2", "--nnodes $N", "--data-parallel-address 10.0.0.1"):
        asked = guard_options(["--", "vllm", "serve", "m", *words.split()], {})
        assert asked.config.engines[0].only_observed, words
        assert not asked.is_acting


def test_a_server_of_its_own_may_be_named_in_the_configuration(tmp_path: Path) -> None:
    """By its address; it comes first, keeps what was said of it, and cannot be restarted in a second way."""
    text = "[[engine]]\nurl = 'http://b:1'\n[[engine]]\nurl = 'http://127.0.0.1:8000'\nname = 'mine'\ngroup = 'g'\n"
    asked = guard_options(["--config", config(tmp_path, text), "--act", "--", "vllm", "serve", "m"], {})
    assert [one.name for one in asked.config.engines] == ["mine", "b:1"]
    assert (asked.own, asked.config.engines[0].group) == ("mine", "g")
    with pytest.raises(BadInput, match=r"line 9: mine is started by guard itself"):
        guard_options(["--config", config(tmp_path, text + "restart = {docker = 'x'}"), "--", "vllm", "serve", "m"], {})
    asked = guard_options(["--engine", "http://127.0.0.1:7", "--", "./start.sh"], {})
    assert (asked.own, asked.command) == ("127.0.0.1:7", ("./start.sh",))
    for words, where in (("--port $P", "http://10.0.0.9:7"), ("--uds /x", "http://10.0.0.9:7"), ("", "http://127.0.0.1:8000")):
        asked = guard_options(["--engine", "http://10.0.0.9:7", "--", "vllm", "serve", "m", *words.split()], {})
        assert asked.config.engines[0].url == where, "its own words count where they tell"
        assert {one.url for one in asked.config.engines} == {where, "http://10.0.0.9:7"}


def test_it_acts_only_when_told_to(tmp_path: Path) -> None:
    """An [act] alone makes it say what it would do; --act with something in hand makes it act."""
    plain, act = "[[engine]]\nurl = 'http://x:1'\n", "[act]\n"
    hand = f"{plain}restart = {{systemd = 'v.service'}}\n"
    for text, words, is_acting, is_dry_run in (
        (act + plain, [], False, True),
        (plain, [], False, False),
        (hand, ["--act"], True, False),
        (act + hand, ["--act"], True, False),
    ):
        asked = guard_options(["--config", config(tmp_path, text), *words], {})
        assert (asked.is_acting, asked.is_dry_run) == (is_acting, is_dry_run)
    assert guard_options(["--engine", "http://x:1", "--act"], {"PLIMSOLL_TOKEN": "t" * 16}).is_acting
    with pytest.raises(BadInput, match="nothing can be done"):
        guard_options(["--config", config(tmp_path, act + plain), "--act"], {})
