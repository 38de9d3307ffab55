"""A real engine seen from outside: its page, a storm on it, guard's look at it, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.engine.server import EngineServer
from plimsoll.doctor.read.prometheus import is_prometheus
from plimsoll.doctor.rules.metrics import judge_pages
from plimsoll.findings import Code, Finding, Severity
from plimsoll.guard.daemon.engine_look import CanaryPlan, CanarySender, EngineWatcher
from plimsoll.guard.daemon.host import SameHost
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.redaction import redact
from plimsoll.vllm.metrics import FIGURES, metrics_of, on_page, resolve
from plimsoll.vllm.metrics_page import fetch_health, fetch_pages
from plimsoll.vllm.versions import engine_named
from tests.each import sure
from tests.fakes import eventually
from tests.real.conftest import need_vllm

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.32.0"
PLAN = CanaryPlan(every_s=5, deadline_s=3)


def test_a_live_storm_is_found_while_it_lasts(small_engine: EngineServer) -> None:
    """Answers of 900 tokens share 17 blocks of 128: a look before and one while it lasts find the storm and how many fit.

    vLLM counts a preemption only when its victim runs again, so the looks must not lie too close together.
    """
    (first,) = fetch_pages(small_engine.url, samples=1)
    with ThreadPoolExecutor(12) as clients:
        replies = [clients.submit(small_engine.complete, f"storm {n}", 900, ignore_eos=True) for n in range(24)]
        found: list[Finding] = []
        done = False
        while not found and not done:
            done = all(reply.done() for reply in replies)
            (second,) = fetch_pages(small_engine.url, samples=1)
            verdict = judge_pages(first, second, health=fetch_health(small_engine.url))
            found = [f for f in verdict.findings if f.code is Code.KV_PREEMPTION_STORM and f.severity is not Severity.INFO]
            time.sleep(0.5)
        assert [reply.result().status for reply in replies] == [200] * 24
    assert found, "no storm was seen"
    assert verdict.facts.engines[0].cache["num_gpu_blocks"] == "18"
    assert [remedy.value for remedy in found[0].remedy if remedy.flag == "--max-num-seqs"] != [None]


def test_page_and_table_agree(engine: EngineServer) -> None:
    """No metric is on one side alone, types and labels are the table's, and our figures are found by version and by page."""
    assert engine.get("/version").json()["version"].startswith(RELEASE)  # without a key: what guard relies on
    assert engine.complete("one two three", max_tokens=4).status == 200
    page, table = engine.metrics(), metrics_of(RELEASE)
    found = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", page, re.MULTILINE))
    types = {name: kind for name, kind in found.items() if not name.endswith("_created")}
    assert sorted(set(types) - set(table)) == []
    promised = {name for name, row in table.items() if row["shown"] == "always"}
    # Labelled counters appear with their first sample: nothing was refused on this engine.
    assert promised - set(types) <= {"vllm:admission_rejections_total"}
    assert {name: kind for name, kind in types.items() if table[name]["type"] not in (kind, "unknown")} == {}
    for name, row in table.items():
        sample = re.search(rf"^{re.escape(name)}(?:_bucket|_count)?{{([^}}]*)}}", page, re.MULTILINE)
        if sample is not None and "labels" in row:
            assert set(re.findall(r"(\w+)=", sample.group(1))) - {"le"} == set(row["labels"]), name  # type: ignore[call-overload]
    for figure in FIGURES:
        by_version, by_page = resolve(figure.name, engine_named(RELEASE)), on_page(figure.name, types)
        assert by_page is None or (by_version is not None and by_version.exposition == by_page), figure.name
    assert redact(page) == page, "a token count is mistaken for a token"
    # It is told from Prometheus, and its OpenMetrics page, packed, holds what the plain one holds.
    assert not is_prometheus(engine.url)
    (plain,), (packed,) = (fetch_pages(f"{engine.url}{path}", samples=1) for path in ("", "/metrics/"))
    assert plain.skipped == packed.skipped == 0
    assert {n for n in plain.by_name if n.startswith("vllm:")} == {n for n in packed.by_name if n.startswith("vllm:")}


async def looked(engine: EngineServer, count: int, pause_s: float) -> list[Look]:
    """So many looks, five seconds apart for the watcher."""
    watcher, found = EngineWatcher(engine.url, None, PLAN), []
    for number in range(count):
        found.append(await watcher.look(5.0 * number, time.time()))
        await asyncio.sleep(pause_s)
    await watcher.close()
    return found


async def test_guards_look_at_a_living_engine(engine: EngineServer) -> None:
    """Every figure, its own version, a token; vLLM's words for a model that it does not serve; the memory of its whole tree."""
    last = (await looked(engine, 3, 1.5))[-1]
    assert (last.reach, last.health, last.is_paused) == (Reach.ANSWERS, 200, False)
    assert (last.vllm or "").startswith(RELEASE)
    wanted = "running waiting kv_cache_usage steps success prompt_tokens host_resident asleep".split()
    assert set(wanted) <= set(last.figures)
    assert time.time() - 900 < sure(last.started_unix_s) < time.time()
    assert last.canary is not None
    assert (last.canary.is_answered, last.canary.is_garbage, last.canary.why) == (True, False, "")
    assert 0 < (last.canary.seconds or 0) < PLAN.deadline_s
    sender = CanarySender(engine.url, PLAN)
    await sender.ask(0.0, "no-such-model")
    assert sender.last is not None
    assert (sender.last.is_answered, sender.last.why) == (None, "the engine does not serve a model named 'no-such-model'")
    here = EngineWatcher(engine.url, same_host=SameHost(engine.port))
    whole = await here.look(0.0, time.time())
    await here.close()
    assert whole.figures["host_resident"] > 1.2 * last.figures["host_resident"], "the page's is of one process"
    assert whole.cards == ()


async def test_guards_look_at_a_stuck_and_at_a_paused_engine(engine: EngineServer) -> None:
    """A stopped core leaves page and /health as they were, and only the test request shows it; a paused one gets none."""
    core = next(child.pid for child in engine.children() if "EngineCore" in child.name)
    os.kill(core, signal.SIGSTOP)
    try:
        last = (await looked(engine, 4, 1.5))[-1]
    finally:
        os.kill(core, signal.SIGCONT)
    assert (last.reach, last.health) == (Reach.ANSWERS, 200)
    assert sure(last.canary).is_answered is False
    assert engine.post("/pause").status == 200
    try:
        found = await looked(engine, 2, 0.5)
    finally:
        engine.post("/resume")
    assert [(look.is_paused, look.canary) for look in found] == [(True, None), (True, None)]


def test_nothing_outlives_a_killed_test_run() -> None:
    """The server's processes and its folder are gone soon after the process that started them is killed without warning."""
    need_vllm()
    starter = "import time; from lab.engine.server import EngineServer; server = EngineServer(); server.start()"
    starter += "; print(server.pid, server.log_path, flush=True); time.sleep(60)"
    runner = subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    server_pid, log_path = sure(runner.stdout).readline().split()
    assert Path(f"/proc/{server_pid}").exists()
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    eventually(lambda: not Path(f"/proc/{server_pid}").exists() and not Path(log_path).parent.exists(), 10)
