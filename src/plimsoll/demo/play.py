"""The whole play: plan, start, four incidents, doctor, and the summary; every process that it starts is ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

from plimsoll.demo import incidents
from plimsoll.demo.fleet import GPU, MODEL, NAMES, SERVE, DemoFleet, run_plimsoll
from plimsoll.demo.incidents import CALM, Stage
from plimsoll.demo.screen import Screen, Watch
from plimsoll.demo.summary import DemoSummary, Incident, actions, times
from plimsoll.demo.traffic import ClientTraffic
from plimsoll.errors import WorldFailed

SHOWN = 8


async def play(screen: Screen, speed: float = 1.0, *, keeps: bool = False) -> DemoSummary:
    """Plays the demo in a temporary folder; returns its summary. `keeps`: goes on afterwards until it is cancelled."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="plimsoll-demo-"))
    except OSError as error:
        raise WorldFailed(
            f"cannot make a temporary folder: {error.strerror or error}; set TMPDIR to one that you may write to"
        ) from None
    try:
        fleet = DemoFleet(folder, speed=speed)
        try:
            return await _play(fleet, screen, speed, keeps=keeps)
        finally:
            await fleet.stop()
    except BrokenPipeError:  # the reader of the output has gone
        raise
    except OSError as error:
        raise WorldFailed(f"{error.filename or folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _play(fleet: DemoFleet, screen: Screen, speed: float, *, keeps: bool) -> DemoSummary:
    kv_tokens = await _planned(screen, asyncio.create_task(fleet.start()))
    traffic = ClientTraffic(fleet.balancer.port, MODEL, streams=True, chance=random.Random(1876))  # noqa: S311 - pauses
    watch = Watch(fleet.guard, screen.guard)
    stage = Stage(fleet, traffic, watch, screen, [CALM], speed)
    screen.head("The fleet")
    screen.plain([
        f"engines    {', '.join(f'{name} on port {port}' for name, port in fleet.ports.items())}: stand-ins for vLLM, no GPU",
        f"balancer   port {fleet.balancer.port}: a small one in this process",
        f"guard      plimsoll guard --config {fleet.folder}/plimsoll.toml --act",
        f"page       {fleet.link}",
    ])  # fmt: skip
    screen.happens(f"all serve; {CALM:.0f} requests a second")
    over = asyncio.Event()
    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(traffic.at_rate(lambda: stage.rate[0], over.is_set))]
    began = time.time()
    try:
        # Torch keeps the memory that two long prompts on a need for a moment.
        prompts = [traffic.send(incidents.LONG_TOKENS, 8, port=fleet.ports[NAMES[0]]) for _ in range(2)]
        await asyncio.wait([asyncio.create_task(stage.pause(1.5)), *prompts], timeout=10.0)
        played = [
            await _one(stage, "Incident 1 of 4: a burst of traffic", incidents.burst),
            await _one(stage, "Incident 2 of 4: another process on the card needs memory", incidents.neighbour),
            await _one(stage, "Incident 3 of 4: an engine that hangs", incidents.wedge),
            await _one(stage, "Doctor: what was it?", _doctored),
            await _one(stage, "Incident 4 of 4: a busy server with a full cache", partial(incidents.full_cache, kv_tokens)),
        ]
        if wrong := await incidents.settled(stage):
            played[2] = replace(played[2], wrong=played[2].wrong or wrong)
        over.set()
        await tasks[1]
        await traffic.rest(30.0)
        watch.look()
        entries, now = watch.entries, time.time()
        summary = DemoSummary(
            now - screen.began, deepcopy(traffic.count), await fleet.balancer.count_sent_again(), played, actions(entries),
            times(entries, NAMES, began, now), fleet.page,
        )  # fmt: skip
        if keeps:
            show_summary(screen, summary)
            screen.head(f"It goes on. The page is at {fleet.link} ; Ctrl-C ends it")
            with contextlib.suppress(asyncio.CancelledError):
                await traffic.at_rate(lambda: stage.rate[0], lambda: False)
    finally:
        traffic.drop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return summary


async def _planned(screen: Screen, starting: asyncio.Task[None]) -> int:
    """Plans while the stand-ins start; returns how many tokens the KV cache will hold."""
    try:
        screen.head("Plan: will it fit?")
        words = ["plan", "--gpu", GPU, "--", "vllm", "serve", *SERVE]
        screen.command(f"plimsoll {' '.join(words)}")
        code, printed = await run_plimsoll("plan", "--json", *words[1:])
        try:
            found = json.loads(printed)
            kv, ledger = found["kv"], found["ledger"]
            weights, room = (ledger[name]["value"] / 2**30 for name in ("weights", "kv"))
            tokens = int(kv["tokens"])
        except (ValueError, KeyError, TypeError):
            raise WorldFailed(f"plan ended with {code}: {printed.strip()[-300:]}") from None
        screen.plain([
            f"fits: beside {weights:.1f} GiB of weights one {GPU} has {room:.1f} GiB for the KV cache: {tokens:,} tokens.",
            "Each of the engines below has this pool; after a restart guard looks whether it is as large again.",
        ])  # fmt: skip
        await starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    return tokens


async def _one(stage: Stage, title: str, plays: Callable[[Stage], Awaitable[str]]) -> Incident:
    stage.screen.head(title)
    began = time.monotonic()
    try:
        wrong = await plays(stage)
    except WorldFailed as error:  # an expected engine is missing: the summary says so
        wrong = str(error)
    if not stage.fleet.guard.is_running:
        wrong = "guard ended"
    if wrong:
        stage.screen.verdict(f"not as it should be: {wrong}", is_good=False)
    await stage.pause(0.5)
    return Incident(title, time.monotonic() - began, wrong)


async def _doctored(stage: Stage) -> str:
    """Runs doctor on the evidence that guard saved before it touched the engine."""
    kept = stage.watch.did("evidence", NAMES[2])
    facts = kept.fields.get("facts") if kept is not None else None
    folder = facts.get("folder") if isinstance(facts, dict) else None
    if not isinstance(folder, str):
        return "no evidence was kept"
    stage.screen.command(f"plimsoll doctor {folder}")
    code, printed = await run_plimsoll("doctor", folder)
    lines = printed.splitlines()
    stage.screen.plain([*lines[:SHOWN], *(["[...]"] if len(lines) > SHOWN else [])])
    return "" if code == 1 and "engine.wedged" in printed else f"doctor did not find it (exit code {code})"


def show_summary(screen: Screen, summary: DemoSummary) -> None:
    """Prints the end of the play."""
    screen.head(f"In {summary.seconds:.0f} s")
    screen.plain(summary.lines())
    lost = len(summary.requests.lost)
    if summary.is_fine:
        screen.verdict("every incident ended as it should; 0 requests lost", is_good=True)
    else:
        bad = sum(bool(one.wrong) for one in summary.played)
        screen.verdict(f"{lost} requests lost; {bad} of {len(summary.played)} parts did not end as they should", is_good=False)
