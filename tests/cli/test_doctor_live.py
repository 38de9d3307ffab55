"""`plimsoll doctor` and `--watch` against servers that run, die in between, or never were."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import unquote_plus

import pytest

from plimsoll.cli.doctor import DoctorOptions, watch
from plimsoll.vllm.metrics_page import fetch_pages
from tests.cli.doctor_runs import H200, one_line, said
from tests.net.page_server import SECRET, Handler, serving

Capsys = pytest.CaptureFixture[str]
BEFORE, DURING, AFTER = ((H200 / f"preemption-storm.metrics-{when}.txt").read_bytes() for when in ("before", "during", "after"))
WELL = (H200 / "healthy.metrics-after.txt").read_bytes()


class Pages:
    """Shows one page after another, and stays with the last; None: nobody is there."""

    def __init__(self, *pages: bytes | None, health: int = 200) -> None:
        self.pages, self.health, self.looks = pages, health, 0

    def __call__(self, handler: Handler) -> None:
        if handler.path.startswith("/health"):
            handler.answer(b"", self.health)
        elif handler.path.startswith("/metrics"):
            page = self.pages[min(self.looks, len(self.pages) - 1)]
            self.looks += 1
            if page is None:
                handler.close_connection = True  # hangs up without a word, as a process does that was killed
                return
            handler.answer(page)
        else:
            handler.answer(b"{}", 404)


def watched(url: str, looks: int, *switches: str, after_look: Callable[[int], None] | None = None) -> tuple[int, list[float]]:
    """Watch without waiting; what was waited for is returned."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if after_look is not None:
            after_look(len(slept))

    options = DoctorOptions(looks=looks, interval=7, timeout=2, json="--json" in switches, rest=(url,))
    return watch(options, sleep=sleep, clock=lambda: 1_700_000_000.0), slept


@pytest.fixture(autouse=True)
def looks_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds pass between two looks, by a clock that nobody waits for."""
    usual = fetch_pages.__kwdefaults__ or {}
    monkeypatch.setitem(usual, "sleep", lambda _: None)
    monkeypatch.setitem(usual, "clock", itertools.count(1_700_000_000.0, 5.0).__next__)


def test_a_running_server_is_looked_at_twice(capsys: Capsys) -> None:
    """Two looks a few seconds apart find the storm that one page cannot show as a rate; the answer names the address."""
    pages = Pages(BEFORE, DURING)
    with serving(pages) as server:
        answer = said(capsys, f"http://{server.host}", "--json", "--timeout", "5")
        asked = [path for path, _ in server.seen]
    assert pages.looks == 2
    assert "/health" in asked
    assert answer.code == 1
    assert answer.codes[0] == "kv.preemption-storm"
    assert answer.body["memory_failure"] is True
    (given,) = answer.body["facts"]["inputs"]
    assert (given["source"], given["is"]) == (f"http://{server.host}", "metrics")


def test_a_page_is_judged_for_what_it_shows(capsys: Capsys) -> None:
    """Also where the server dies between two looks; an idle one is not said to answer, since its page looks the same."""
    with serving(Pages(DURING, None)) as server:
        answer = said(capsys, f"http://{server.host}/metrics", "--json", "--timeout", "2")
    assert answer.code in (0, 1)
    assert answer.body["facts"]["inputs"][0]["is"] == "metrics"
    assert "answered the first look and not the second" in answer.body["facts"]["notes"][0]
    idle = WELL.replace(b"\r", b"")
    with serving(Pages(idle, idle)) as server:
        answer = said(capsys, f"http://{server.host}", "--timeout", "5")
    assert answer.code == 0
    assert "whether it would answer one is not known (plimsoll guard --engine" in " ".join(answer.out.split())


def test_what_is_no_page_is_the_worlds_fault(capsys: Capsys) -> None:
    """An address that answers 404, or nobody: exit 3 and one line, without the password that was given."""
    with serving(lambda handler: handler.answer(b"", 404)) as server:
        answer = said(capsys, f"http://me:{SECRET}@{server.host}", "--timeout", "2")
        assert answer.code == 3
        assert SECRET not in one_line(answer)
        gone = f"http://{server.host}"
    answer = said(capsys, gone, "--timeout", "2")
    assert answer.code == 3
    one_line(answer)


def test_watching_says_what_changes(capsys: Capsys) -> None:
    """One line a look; a finding in full when it comes, once, and that it is over when it goes."""
    with serving(Pages(BEFORE, DURING, DURING, WELL, WELL)) as server:
        code, slept = watched(f"http://{server.host}", 5)
    out = capsys.readouterr().out
    assert slept == [7.0] * 4
    assert sum(server.host in line for line in out.splitlines()) == 5
    assert sum(line.strip().startswith("kv.preemption-storm: ") for line in out.splitlines()) == 1
    assert sum("over: " in line for line in out.splitlines()) == 1
    assert code == 0, "at the last look nothing was wrong"


def test_watching_outlives_the_server(capsys: Capsys) -> None:
    """A server that dies in between is said once, not at every look; it is watched on, and seen when it is back."""
    with serving(Pages(WELL, None, None, None, WELL)) as server:
        code, _ = watched(f"http://{server.host}", 5)
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if "nothing wrong" in line or "running" in line]) == 2
    assert len(out) == 3, out
    assert code == 0
    with serving(Pages(WELL, None)) as server:
        assert watched(f"http://{server.host}", 3)[0] == 1


def test_a_dead_engine_behind_a_living_server_is_seen(capsys: Capsys) -> None:
    """/health answers 503 while the page still stands: the engine is dead."""
    with serving(Pages(WELL, WELL, health=503)) as server:
        code, _ = watched(f"http://{server.host}", 2)
    assert code == 1
    assert "engine.dead" in capsys.readouterr().out


def test_every_look_is_one_object_with_json(capsys: Capsys) -> None:
    """--watch --json prints one object a line, also of a server that is not there."""
    with serving(Pages(BEFORE, DURING, None)) as server:
        watched(f"http://{server.host}", 3, "--json")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    assert all(row["server"].startswith(f"http://{server.host}") and row["at"] == 1_700_000_000.0 for row in rows)
    assert rows[1]["findings"][0]["code"] == "kv.preemption-storm"
    assert set(rows[1]["engines"][0]) == {"engine", "running", "waiting", "kv_cache_usage", "preemptions"}
    assert "error" in rows[2]


def test_watching_looks_at_all_and_ends_with_the_command(capsys: Capsys) -> None:
    """A bad first server does not hide the second; --looks is kept."""
    with serving(Pages(WELL)) as server:
        options = DoctorOptions(looks=1, timeout=2, rest=("http://127.0.0.1:1", f"http://{server.host}"))
        assert watch(options, sleep=lambda _: None) == 1
    out = capsys.readouterr().out
    assert server.host in out
    assert "127.0.0.1:1" in out
    with serving(Pages(WELL)) as server:
        answer = said(capsys, "--watch", f"http://{server.host}", "--looks", "2", "--interval", "0.05")
    assert answer.code == 0
    assert answer.out.count("nothing wrong") == 2


def prometheus(asked: list[str], *, values: list[float]) -> Callable[[Handler], None]:
    """A Prometheus server that knows one figure of one engine, and remembers what it was asked."""

    def act(handler: Handler) -> None:
        path, _, query = handler.path.partition("?")
        if path.endswith("/buildinfo"):
            handler.answer(json.dumps({"status": "success", "data": {"version": "2.42.0"}}).encode())
            return
        asked.append(query)
        rows = []
        if "kv_cache_usage_perc" in query:
            points = [[1_700_000_000 + 15 * n, str(value)] for n, value in enumerate(values)]
            rows = [{"metric": {"__name__": "vllm:kv_cache_usage_perc", "engine": "0", "instance": "h:8000"}, "values": points}]
        handler.answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}).encode())

    return act


def test_a_prometheus_server_is_asked_for_the_range(capsys: Capsys) -> None:
    """Known by what it answers; start, end, step and labels go into the question, and the range is judged."""
    asked: list[str] = []
    with serving(prometheus(asked, values=[0.2] * 40)) as server:
        url = f"http://{server.host}"
        times = ["--start", "1700000000", "--end", "1700000600", "--step", "15", "--match", "namespace=prod,job='vllm'"]
        answer = said(capsys, url, *times, "--json")
        assert answer.code == 0
        (given,) = answer.body["facts"]["inputs"]
        assert (given["source"], given["is"]) == (url, "range")
        plain = said(capsys, url, "--json", "--since", "2h")
        assert plain.body["facts"]["inputs"][0]["is"] == "range"
    assert asked
    first = unquote_plus(asked[0])
    assert "start=1700000000" in first
    assert "end=1700000600" in first
    assert "step=15" in first
    assert 'namespace="prod"' in first
    assert 'job="vllm"' in first


def test_a_range_asked_of_a_server_that_keeps_none_is_the_worlds_fault(capsys: Capsys) -> None:
    """--since against vLLM itself: exit 3 and one line, not a judgement over nothing."""
    with serving(Pages(WELL)) as server:
        answer = said(capsys, f"http://{server.host}", "--since", "1h", "--timeout", "3")
    assert answer.code == 3
    assert "no Prometheus is there; without --since the server itself is looked at" in one_line(answer)


# A shell may have made its children deaf to Ctrl-C: the default comes back first.
HEARING = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"


def test_a_watch_ends_quietly_with_ctrl_c() -> None:
    """Ctrl-C ends it without a traceback, with the exit code of the last look."""
    with serving(Pages(WELL)) as server:
        words = [sys.executable, "-m", "plimsoll", "doctor", "--watch", f"http://{server.host}", "--interval", "30"]
        command = [sys.executable, "-c", HEARING, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "nothing wrong" in process.stdout.readline()
        process.send_signal(2)
        _, err = process.communicate(timeout=10)
    assert err == ""
    assert process.returncode == 0
