"""How much guard needs to watch a fleet: processor and memory for 1 to 500 engines, looked at every five seconds.

Guard is one process: the real `cli.guard_loop.Fleet` with its looks, judgements and sentences, whose histories are full as they
are after a day, and every ten seconds its own page of metrics and the list of all engines, as a Prometheus and a person would
ask for them. A single engine is also looked at from the machine it runs on. The engines are another process: `plimsoll standin
--fleet N`, whose pages are about as large as the captured one, or a server of one page of eight data-parallel ranks. Then, how
fast a page is read, against prometheus_client's parser.

    python -m benchmarks.guard_scale [parse judge standin ranks]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import re
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.standin import cpu_s, resident_mb, started, stopped

if TYPE_CHECKING:  # what is measured must not be there before
    from plimsoll.guard.api.api import GuardApi
    from plimsoll.guard.judge.judge import Judge
    from plimsoll.guard.judge.look import Look
    from plimsoll.render.guard import Event

CAPTURED = Path(__file__).parents[1] / "tests" / "captures" / "vllm-0.32.0-cpu" / "metrics.txt"
COUNTS = (1, 10, 100, 500)
EVERY_S = 5.0
WARM_S = 6.0
MEASURED_S = 15.0
ASKED_EVERY_S = 10.0
FULL = 400  # looks that fill half an hour
DAY = 720  # points of two minutes that fill a day
FIRST_PORT = 22_000
RANKS = 8
TARGETS = {1: (0.01, 70.0), 500: (0.5, 200.0)}  # engines: cores, MB

SERVER = """
import asyncio, sys
page = open(sys.argv[1], "rb").read()
answer = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\nContent-Length: %d\\r\\n\\r\\n%s"
replies = {b"/metrics": answer % (len(page), page), b"/health": answer % (0, b"")}
missing = b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\n\\r\\n"
class Server(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): self.transport.write(replies.get(data.split()[1], missing))
async def main():
    loop = asyncio.get_running_loop()
    for port in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
        await loop.create_server(Server, "127.0.0.1", port, backlog=16)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def ranks(page: bytes, count: int) -> bytes:
    """The same page as of so many data-parallel ranks."""
    lines = []
    for line in page.decode().splitlines():
        many = [line.replace('engine="0"', f'engine="{rank}"') for rank in range(count)]
        lines += many if 'engine="0"' in line else [line]
    return ("\n".join(lines) + "\n").encode()


def busy(page: bytes) -> bytes:
    """The same page of an engine with work: the judge has more to think about."""
    for name, value in (("num_requests_running", "12.0"), ("num_requests_waiting", "3.0"), ("kv_cache_usage_perc", "0.97")):
        page = re.sub(rb"(?m)^(vllm:%s\{[^}]*\}) .*$" % name.encode(), rb"\1 " + value.encode(), page)
    return page


def full_judge(first: Look) -> Judge:
    """One that has seen a day of an engine like this."""
    from plimsoll.guard.judge.judge import Judge
    from plimsoll.guard.judge.policy import read_policy

    judge = Judge("engine", read_policy({}))
    ages_s = [FULL * EVERY_S + 120.0 * number for number in range(DAY, 0, -1)]  # a point of the long history each
    for age_s in (*ages_s, *(number * EVERY_S for number in range(FULL, 0, -1))):
        judge.see(first._replace(at_s=first.at_s - age_s, unix_s=first.unix_s - age_s))
    return judge


async def watch(first_port: int, count: int) -> dict[str, float]:
    """Watch so many engines for a while; what it took in this process."""
    from plimsoll.guard.api.api import GuardApi
    from plimsoll.guard.daemon.engine_look import EngineWatcher
    from plimsoll.guard.daemon.host import SameHost
    from plimsoll.guard.daemon.observer import Fleet, ObserverPorts
    from plimsoll.guard.engine_config import EngineConfig
    from plimsoll.guard.judge.look import Reach
    from plimsoll.guard.judge.policy import read_policy

    said: list[Event] = []
    policy = read_policy({})._replace(every_s=EVERY_S)

    def watcher(target: EngineConfig) -> EngineWatcher:
        same_host = SameHost(first_port) if count == 1 else None
        return EngineWatcher(target.url, same_host=same_host)

    probe = EngineWatcher(f"http://127.0.0.1:{first_port}")
    first = await probe.look(time.monotonic(), time.time())
    await probe.close()
    assert first.reach is Reach.ANSWERS, first.why
    full = full_judge(first)
    fleet = Fleet(policy, ObserverPorts(watcher, said.append))
    fleet.watch([EngineConfig(f"engine-{number}", f"http://127.0.0.1:{first_port + number}") for number in range(count)])
    for one in fleet._engines.values():  # noqa: SLF001  # none of them has been looked at yet
        one.judge = copy.deepcopy(full)
    asked = asyncio.create_task(_asked(GuardApi(fleet, time.time())))
    await asyncio.sleep(WARM_S)
    used, at_s, before = _cpu_s(), time.monotonic(), sum(view.looks for view in fleet.views())
    await asyncio.sleep(MEASURED_S)
    cores = (_cpu_s() - used) / (time.monotonic() - at_s)
    views = fleet.views()
    asked.cancel()
    await fleet.close()
    took = sorted(view.look_s for view in views if view.look_s is not None)
    assert not fleet.mistakes, fleet.mistakes
    return {
        "engines": count, "cores": cores, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "looks": sum(view.looks for view in views), "failures": sum(sum(view.failures.values()) for view in views),
        "share": (sum(view.looks for view in views) - before) / (count * MEASURED_S / EVERY_S), "said": len(said),
        "look_p50_ms": took[len(took) // 2] * 1e3, "look_p99_ms": took[int(len(took) * 0.99)] * 1e3,
    }  # fmt: skip


async def _asked(api: GuardApi) -> None:
    while True:
        for path in ("/metrics", "/engines"):
            found = api.answer(path, {})
            assert not isinstance(found, Awaitable)
            assert getattr(found, "status", None) == 200
        await asyncio.sleep(ASKED_EVERY_S)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(servers: Callable[[int], list[str]], what: str) -> None:
    """The curve over the number of engines, each point in a process of its own."""
    for count in COUNTS:
        process = started(servers(count), FIRST_PORT + count - 1)
        try:
            time.sleep(2)
            before, began = cpu_s(process.pid), time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.guard_scale", "--watch", str(FIRST_PORT), str(count)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            row = json.loads(done.stdout) | {"page_kb": _page_kb(FIRST_PORT)}
            share = (cpu_s(process.pid) - before) / (time.monotonic() - began)
            memory = resident_mb(process.pid)
        finally:
            stopped(process)
        assert row["failures"] == 0, row
        assert row["share"] > 0.85, f"looks came late: {row}"
        print(
            f"{what} ({row['page_kb']:.0f} KB), {count:3} engines: {row['cores']:.4f} cores, {row['peak_mb']:.0f} MB at most; "
            f"a look {row['look_p50_ms']:.1f} ms, p99 {row['look_p99_ms']:.1f} ms{_verdict(row, count)}; "
            f"the servers took {share:.2f} cores and {memory:.0f} MB",
            flush=True,
        )


def _page_kb(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return len(page.read()) / 1e3


def _verdict(row: dict[str, float], count: int) -> str:
    if count not in TARGETS:
        return ""
    cores, most = TARGETS[count]
    return f" (target {cores:g} cores, {most:.0f} MB: {'met' if row['cores'] < cores and row['peak_mb'] < most else 'MISSED'})"


def standin() -> None:
    """Against stand-ins."""
    measured(
        lambda count: [
            sys.executable, "-m", "plimsoll", "standin", "--disable-uvicorn-access-log", "--fleet", str(count),
            "--port", str(FIRST_PORT),
        ], "stand-ins",
    )  # fmt: skip


def of_ranks() -> None:
    """Against pages of eight ranks."""
    page = Path("/tmp") / "plimsoll-guard-scale-ranks.txt"
    page.write_bytes(busy(ranks(CAPTURED.read_bytes(), RANKS)))
    measured(
        lambda count: [sys.executable, "-c", SERVER, str(page), str(FIRST_PORT), str(count)],
        f"busy pages of {RANKS} ranks",
    )
    page.unlink()


def parse() -> None:
    """One page, read by both."""
    from prometheus_client.parser import text_string_to_metric_families

    from plimsoll.guard.daemon.engine_figures import PageReader

    def ours(page: bytes) -> None:
        reader = PageReader()
        for at in range(0, len(page), 65_536):
            reader.feed(page[at : at + 65_536])
        reader.done()

    def theirs(page: bytes) -> None:
        for family in text_string_to_metric_families(page.decode()):
            assert family.samples is not None

    for count in (1, RANKS):
        page = ranks(CAPTURED.read_bytes(), count)
        own, other = _best_ms(ours, page, 200), _best_ms(theirs, page, 10)
        print(f"a page of {count} ranks, {len(page) / 1e3:.0f} KB: {own:.2f} ms; prometheus_client {other:.1f} ms: "
              f"{other / own:.0f} times as fast")  # fmt: skip


def _best_ms(action: Callable[[bytes], None], page: bytes, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        action(page)
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def judge() -> None:
    """One judgement with a full history, of an engine at rest and of a busy one."""
    from plimsoll.guard.daemon.engine_figures import PageReader
    from plimsoll.guard.judge.judge import Judge
    from plimsoll.guard.judge.look import Look, Reach
    from plimsoll.guard.judge.policy import read_policy

    for what, page in (("at rest", CAPTURED.read_bytes()), ("busy", busy(CAPTURED.read_bytes()))):
        reader = PageReader()
        reader.feed(page)
        found = reader.done()
        one, took = Judge("engine", read_policy({})), []
        for number in range(1, 2 * FULL):
            grown = dict(found.figures)
            grown |= {name: grown[name] + 50 * number for name in ("steps", "generation_tokens", "prompt_tokens")}
            began = time.perf_counter()
            one.see(
                Look(number * EVERY_S, 1e9 + number * EVERY_S, Reach.ANSWERS, health=200, figures=grown, started_unix_s=1e9)
            )
            took.append(time.perf_counter() - began)
        print(f"a judgement of an engine {what}: {sorted(took[FULL:])[FULL // 2] * 1e3:.2f} ms")


PARTS: dict[str, Callable[[], None]] = {"parse": parse, "judge": judge, "standin": standin, "ranks": of_ranks}


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--watch", nargs=2, type=int, metavar=("PORT", "COUNT"), help=argparse.SUPPRESS)
    asked = parser.parse_args(None if __name__ == "__main__" else [])
    if asked.watch:
        print(json.dumps(asyncio.run(watch(*asked.watch))))
        return
    for name in asked.parts or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
