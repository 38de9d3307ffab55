"""What goes wrong with guard itself: said once, shown while it lasts, said to be over; and no finder ends the watching."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plimsoll.errors import WorldFailed
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.discovery import DiscoverConfig
from plimsoll.guard.adapters.pods import PodFinder, PodsConfig
from plimsoll.guard.config import GuardConfig
from plimsoll.guard.daemon.observer import DiscoveredFacts
from plimsoll.guard.daemon.run import MOST_TEXTS, MOST_WAITING, EngineLists, LineWriter, SystemdNotifier, TroubleLog
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.inside.settings import InsideSettings
from plimsoll.standin.config import ServerFlags
from tests.cli.test_guard import QUICK, config, url
from tests.cluster_api import pod
from tests.each import cases
from tests.fakes import TOKEN, eventually
from tests.guard.daemon.guards import Guard, guarding
from tests.net.page_server import receiving
from tests.standin.engines import engine
from tests.standin.servers import SLOW, standin


class Clock:
    """A clock that is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_trouble_is_told_once_and_its_end_once() -> None:
    """However often it is noted; another text is told as well, one that comes back is not, and a short one never was."""
    said: list[str] = []
    troubles = TroubleLog(said.append, Clock())
    for text in ("", "down", "down", "odd", "down", "", "", "down"):
        troubles.note("x", text)
    assert said == ["x: down", "x: odd", "x: recovered", "x: down"]
    assert [(one.what, one.text) for one in troubles.now()] == [("x", "down")]
    for number in range(10 * MOST_TEXTS):
        troubles.note("y", f"down for the {number}th time")
    assert len(said) == 4 + MOST_TEXTS
    said.clear()
    clock = Clock()
    troubles = TroubleLog(said.append, clock)
    for now_s, text in ((0.0, "down"), (9.0, "down"), (9.5, ""), (20.0, "down"), (29.0, "down")):
        clock.now_s = now_s
        troubles.note("x", text, patience_s=10.0)
    assert (said, troubles.now()) == ([], ())
    clock.now_s = 30.0
    troubles.note("x", "down", patience_s=10.0)
    assert said == ["x: down"]
    assert troubles.now()[0].since_s == 20.0


class Finder:
    """Finds what it is told."""

    label = "a finder"

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.trouble = ""
        self.targets: tuple[EngineConfig, ...] = ()

    def find(self) -> tuple[EngineConfig, ...]:
        if self.problem is not None:
            raise self.problem
        return self.targets


def asked(lists: EngineLists, finder: Finder) -> list[str]:
    """Ask it; the names that are watched then."""
    asyncio.run(lists.ask(finder))
    return [target.name for target in lists.targets()]


@pytest.mark.parametrize(
    "problem", [WorldFailed("gone"), RuntimeError("x"), RecursionError(), UnicodeEncodeError("a", "b", 0, 1, "c")]
)
def test_no_finder_ends_it(problem: Exception) -> None:
    """Whatever a finder raises, what it said before holds, and the trouble is said."""
    noted: list[tuple[str, str]] = []
    lists = EngineLists(GuardConfig(), lambda what, text: noted.append((what, text)))
    finder = Finder()
    finder.targets = (EngineConfig("a", "http://a:1"),)
    assert asked(lists, finder) == ["a"]
    finder.problem = problem
    assert asked(lists, finder) == ["a"]
    assert noted[0] == ("a finder", "")
    assert "the last list stays in use" in noted[1][1]
    finder.problem, finder.trouble = None, "one file is broken"
    assert asked(lists, finder) == ["a"]
    assert noted[2] == ("a finder", "one file is broken")


def test_what_is_known_of_a_pod_reaches_the_look_under_the_name_it_has_here(tmp_path: Path) -> None:
    """Restarts of its container, also where an engine of the configuration is called the same."""
    discover = DiscoverConfig(token="t" * 16, canary_s=30.0, api_key="k")
    config = GuardConfig(engines=(EngineConfig("llm/pod", "http://named:1"),), discover=discover)
    lists = EngineLists(config, lambda *_: None)
    lists.pods = PodFinder(PodsConfig("app=vllm"), ClusterClient("http://127.0.0.1:9", str(tmp_path)))
    counts = {"containerStatuses": [{"name": "vllm", "restartCount": 4}]}
    for item in (pod("pod", address="10.0.0.1", status=counts), pod("other")):
        lists.pods._take("llm", {"type": "ADDED", "object": item})
    lists.take_pods()
    assert [target.name for target in lists.targets()] == ["llm/pod", "llm/pod http://10.0.0.1:8000", "llm/other"]
    assert lists.facts("llm/pod http://10.0.0.1:8000") == DiscoveredFacts(4, "")
    assert lists.facts("llm/other") == lists.facts("llm/pod") == DiscoveredFacts()
    named, found, _ = lists.targets()
    assert (named.token, named.api_key, found.token, found.api_key, found.canary_s) == (None, None, "t" * 16, "k", 30.0)


@pytest.mark.real
@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_a_signal_in_a_drain_puts_the_engine_back(name: str, tmp_path: Path) -> None:
    """A terminal that is closed, or a stop: the restart that waits for a long request is undone before guard ends."""
    (tmp_path / "t").write_text(TOKEN, encoding="utf-8")
    flags = ServerFlags(is_dev_mode=True, token=TOKEN, middleware=("plimsoll.inside.Gate",))
    with standin(flags, one=engine(step_time=SLOW), settings=InsideSettings({"PLIMSOLL_TOKEN": TOKEN})) as server:

        def phase() -> str:
            return str(server.ask("GET", "/plimsoll/state", Authorization=f"Bearer {TOKEN}").json()["drain"]["phase"])

        text = f"[[engine]]\nurl = '{url(server)}'\nname = 'one'\ntoken_file = 't'\nbalancer = 'readiness'\n"
        text += "restart = {stop = ['true'], start = ['true', 'start'], is_running = ['true']}\n"
        text += f"[act]\njournal = '{tmp_path / 'guard.journal'}'\nmay_be_last = true\n"
        with guarding(tmp_path, "--act", "--config", config(tmp_path, text)) as guard:
            guard.hears("answers")
            long = {"prompt": "hi", "max_tokens": 2_000, "ignore_eos": True}
            threading.Thread(target=lambda: server.ask("POST", "/v1/completions", long), daemon=True).start()
            assert guard.get("/v1/engines/one/restart", "POST", {})[0] == 200
            eventually(lambda: phase() != "serving")
            guard.process.send_signal(signal.Signals[name])
            assert guard.process.wait(40) == 0
            guard.hears("one: restart undone: guard stopped")
            assert phase() == "serving"


@pytest.mark.real
def test_whatever_ends_guards_right_to_act_is_a_critical_notice_everywhere_and_ends_by_itself(tmp_path: Path) -> None:
    """Another file stands in the journal's place: webhook, metric, page, guardctl and /healthz say so until it is back."""
    journal, aside = tmp_path / "state" / "guard.journal", tmp_path / "aside"

    def status(guard: Guard) -> int:
        command = [sys.executable, "-m", "plimsoll", "guardctl", "status", "--at", f"http://127.0.0.1:{guard.port}"]
        environ = {**os.environ, "PLIMSOLL_GUARD_TOKEN": guard.token}
        return subprocess.run(command, env=environ, check=False, capture_output=True, timeout=60).returncode

    with standin() as server, receiving() as receiver:
        text = f"{QUICK}[notify]\nwebhook = '{receiver.url}'\n[[engine]]\nurl = '{url(server)}'\nname = 'one'\n"
        text += "restart = {stop = ['true'], start = ['true', 'start'], is_running = ['true']}\n"
        text += f"[act]\njournal = '{journal}'\n"
        with guarding(tmp_path, "--act", "--config", config(tmp_path, text)) as guard:
            guard.hears("answers")
            assert (guard.get("/healthz")[0], status(guard)) == (200, 0)
            eventually(journal.exists)
            for file in journal.parent.glob("guard.journal*"):
                file.rename(aside.with_name(f"aside-{file.name}"))
            journal.write_text("somebody else's")
            assert guard.get("/v1/pause", "POST", {})[0] == 409
            guard.hears("guard cannot act: ")
            assert guard.get("/healthz")[0] == 503
            assert guard.get("/v1/engines/one/restart", "POST", {})[0] == 409
            assert status(guard) == 1
            assert 'plimsoll_guard_trouble{what="acting (journal)"} 1.0' in guard.get("/metrics")[1]
            assert any("guard cannot act" in trouble["text"] for trouble in guard.json("/engines")["troubles"])
            eventually(lambda: any("guard cannot act" in str(alert) and "critical" in str(alert) for alert in receiver.got))
            journal.unlink()
            for file in tmp_path.glob("aside-*"):
                file.rename(journal.with_name(file.name.removeprefix("aside-")))
            guard.hears("guard can act again", 60.0)
            assert (guard.get("/healthz")[0], status(guard)) == (200, 0)
            assert guard.stop() == 0


def test_what_systemd_is_told(tmp_path: Path) -> None:
    """Ready, alive, a line of status, stopping, in its own words, also in its abstract space; without it nothing happens."""
    for environ in cases("guard", "environments without systemd"):
        absent = SystemdNotifier(environ)
        absent.send("READY=1", "x")
        assert absent.watchdog_s is None, environ
    path, name = str(tmp_path / "notify"), f"plimsoll-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        systemd.bind(path)
        other.bind("\0" + name)
        systemd.settimeout(5)
        other.settimeout(5)
        SystemdNotifier({"NOTIFY_SOCKET": "@" + name}).send("STOPPING=1")
        assert other.recv(100) == b"STOPPING=1"
        notifier = SystemdNotifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
        assert notifier.address
        assert notifier.watchdog_s == 15.0
        notifier.send("READY=1", "two engines\nREADY=0")
        notifier.send("WATCHDOG=1", "all well")
        notifier.send("", "x" * 1_000)
        notifier.send("STOPPING=1")
        heard = [systemd.recv(4096).decode() for _ in range(4)]
    assert (heard[0], heard[1]) == ("READY=1\nSTATUS=two engines READY=0", "WATCHDOG=1\nSTATUS=all well")
    assert (heard[2], heard[3]) == ("STATUS=" + "x" * 500, "STOPPING=1")


def test_lines_come_out_in_order_and_a_full_disk_is_no_end(tmp_path: Path) -> None:
    """Each on its own line; on a full disk the watching goes on, and the trouble is known."""
    path = tmp_path / "out"
    with path.open("wb") as file:
        out = LineWriter(file.fileno())
        for number in range(1_000):
            out.say(str(number))
        out.close()
    assert path.read_text(encoding="utf-8").split() == [str(number) for number in range(1_000)]
    with Path("/dev/full").open("wb") as full:
        out = LineWriter(full.fileno())
        out.say("x")
        out.say("y")
        out.close()
    assert (out.trouble, out.dropped, out.is_gone) == ("No space left on device", 2, False)


def test_a_reader_that_stands_still_holds_nothing_up_and_one_that_reads_again_ends_the_trouble(tmp_path: Path) -> None:
    """What cannot be written is counted and dropped, the end does not wait for it; a file with the old number gets no lines."""
    reading, writing = os.pipe()
    out = LineWriter(writing)
    begun = time.monotonic()
    for _ in range(3 * MOST_WAITING):
        out.say("x" * 100)
    assert out.dropped > MOST_WAITING
    assert out.trouble == "its reader does not read"
    out.close(0.1)
    assert time.monotonic() - begun < 60.0
    os.close(reading)
    eventually(lambda: out.is_gone)
    os.close(writing)
    reading, writing = os.pipe()
    out = LineWriter(writing)
    while not out.dropped:
        out.say("x" * 100)
    assert out.trouble
    end = time.monotonic() + 20
    while out.trouble and time.monotonic() < end:
        os.read(reading, 65_536)
    assert (out.trouble, out.dropped) == ("", 1)
    os.close(reading)
    os.close(writing)
    with (tmp_path / "one").open("wb") as one, (tmp_path / "other").open("wb") as other:
        assert {one.fileno(), other.fileno()} == {reading, writing}
        out.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0, 0]
