"""The four incidents. Each causes trouble, waits for guard's reaction, and returns what went wrong, "" if nothing did."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from plimsoll.demo.fleet import NAMES, DemoFleet
from plimsoll.demo.screen import Screen, Watch
from plimsoll.demo.traffic import ClientTraffic
from plimsoll.guard.act.journal_entry import OPENED

CALM, BUSY = 3.0, 16.0  # requests a second
BUSY_TOKENS = 72
AFTER_S = 4.0  # how long the burst lasts after guard began to shed
LONG_TOKENS = 3_000
JOBS = 4
JOB_SHARE = 0.24  # of the KV cache, for each of them: together it is full, and each has room for its answer
JOB_OUTPUT = 150
FULL = 0.95
FULL_S = 3.0
_ANSWERS = {"True": "yes", "False": "no", "true": "yes", "false": "no"}


class Stage(NamedTuple):
    """The context of an incident. `rate` holds one number: requests a second through the balancer."""

    fleet: DemoFleet
    traffic: ClientTraffic
    watch: Watch
    screen: Screen
    rate: list[float]
    speed: float

    def happens(self, text: str) -> None:
        """Prints what the demo does, after everything that guard has reported by now."""
        self.watch.look()
        self.screen.happens(text)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)


async def burst(stage: Stage) -> str:
    """Five times the traffic: new work that would wait too long is refused until the queue stops growing."""
    watch, count = stage.watch, stage.traffic.count
    since, waited = watch.last, count.waited
    stage.happens(
        f"{BUSY:.0f} requests a second in place of {CALM:.0f}, with longer answers: more than three engines can serve"
    )
    over = asyncio.Event()
    coming = asyncio.create_task(stage.traffic.at_rate(lambda: BUSY - CALM, over.is_set, tokens=BUSY_TOKENS))
    try:
        is_shed = await watch.until(lambda: watch.did("shed", since=since) is not None, 30.0)
        await asyncio.sleep(max(2.0, AFTER_S / stage.speed))  # or hardly any client is told to wait
    finally:
        over.set()
        await asyncio.gather(coming, return_exceptions=True)
    if not is_shed:
        return "guard did not shed within 30 s"
    told = count.waited - waited
    stage.happens(f"the burst is over; {told} requests were told to come again (503 with Retry-After), and do")
    opened = {one.action for one in watch.entries if one.kind == OPENED and one.number > since}
    if not await watch.until(lambda: len(watch.ends("shed", since=since)) >= len(opened), 30.0):
        return "shedding did not end within 30 s of the burst"
    if set(watch.ends("shed", since=since)) != {"done"}:
        return "shedding did not end as it should"
    return "" if told else "nobody was told to wait"


async def neighbour(stage: Stage) -> str:
    """Another process needs memory that torch holds without use: compaction releases it."""
    fleet, watch, engine = stage.fleet, stage.watch, NAMES[0]
    since = watch.last
    free, unused, _ = await fleet.memory(engine)
    wanted = int(free + unused * 0.5)
    stage.happens(
        f"on {engine}'s card torch holds {_gib(unused)} that it does not use, since some long prompts; {_gib(free)} are free"
    )
    await fleet.fault(engine, "neighbour", wanted)
    stage.happens(f"another process starts on that card and wants {_gib(wanted)}")
    try:
        is_over = await watch.until(lambda: bool(watch.ends("compact", engine, since)), 30.0)
        await asyncio.sleep(0.5)
        _, _, held = await fleet.memory(engine)
    finally:
        await fleet.mend(engine)
    if not is_over:
        return "guard did not compact within 30 s"
    stage.happens(f"that process has {_gib(held)} of the {_gib(wanted)} that it wanted; {engine} served on meanwhile")
    if watch.ends("compact", engine, since)[0] != "done":
        return "compaction did not help"
    return "" if held >= 0.95 * wanted else "the other process did not get what it wanted"


async def full_cache(kv_tokens: int, stage: Stage) -> str:
    """Four long jobs fill the KV cache to the brim with no queue behind: busy and healthy, so nothing is done."""
    fleet, watch, engine = stage.fleet, stage.watch, NAMES[1]
    port, since, length = fleet.ports[engine], watch.last, int(JOB_SHARE * kv_tokens)
    stage.happens(f"{JOBS} jobs of {length:,} tokens each fill {engine}'s cache of {kv_tokens:,} tokens")
    stage.rate[0] = CALM / 3
    jobs = [stage.traffic.send(length, JOB_OUTPUT, port=port) for _ in range(JOBS)]
    highest, full_since = 0.0, 0.0
    loop = asyncio.get_running_loop()
    seen: dict[str, Any] = {}
    while not all(job.done() for job in jobs):
        found = (await fleet.guard.ask(f"/engines/{engine}") or {}).get("engine") or {}
        usage = float((found.get("figures") or {}).get("kv_cache_usage") or 0.0)
        highest = max(highest, usage)
        if usage < FULL:
            full_since = 0.0
        elif not full_since:
            full_since = loop.time()
        elif loop.time() - full_since >= FULL_S:
            seen = found
            break
        await asyncio.sleep(0.2)
    stage.rate[0] = CALM
    if not seen:
        return f"the cache was not full for long enough: {highest:.0%} at most"
    backlog: dict[str, Any] = next((one for one in seen.get("conditions") or () if one.get("kind") == "backlog"), {})
    view = f"{backlog.get('message', 'unknown')}: {_ANSWERS.get(str(backlog.get('status')), 'unknown')}"
    stage.happens(f"guard's answer to whether requests queue for {engine}'s cache: {view} ({backlog.get('reason')})")
    await asyncio.wait(jobs, timeout=40.0)
    if any(one.number > since and one.kind == OPENED and one.engine == engine for one in watch.entries):
        return "guard did something to a healthy server"
    stage.happens("a full cache with a short queue is a server at work: guard did nothing, and that is right")
    return ""


async def wedge(stage: Stage) -> str:
    """An engine stops making steps while /health says 200: out of the balancer, stopped, started, verified, back in."""
    fleet, watch, engine = stage.fleet, stage.watch, NAMES[2]
    since = watch.last
    stage.rate[0] = CALM / 3
    await fleet.fault(engine, "idle-hang")
    stage.happens(f"{engine} stops making steps the next time it is idle, as after a driver that hangs; /health still says 200")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(15.0):
            while await fleet.in_flight(engine):
                await asyncio.sleep(0.1)
    for _ in range(3):
        stage.traffic.send()
    stage.rate[0] = CALM * 2 / 3
    stage.happens("the next requests get no answer there; a balancer that only asks /health would go on sending them")
    back = await watch.until(
        lambda: watch.did("undrain", engine, since) is not None or bool(watch.ends("restart", engine, since)), 60.0
    )
    return "" if back and watch.did("undrain", engine, since) else "it was not back in rotation within 60 s"


async def settled(stage: Stage) -> str:
    """The end of the wedge: its restart counts as a success only after a while without trouble."""
    watch, engine = stage.watch, NAMES[2]
    if not await watch.until(lambda: bool(watch.ends("restart", engine)), 30.0):
        return "its probation did not end within 30 s"
    return "" if watch.ends("restart", engine)[-1] == "done" else "the restart did not help"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
