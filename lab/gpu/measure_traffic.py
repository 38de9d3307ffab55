"""Serves a model on a GPU, sends it traffic at set times and writes down when each request got its first and its last token.

On the GPU host, where vLLM is importable:   python3 measure_traffic.py RUNS.json

A run: {"name": "tight", "model": "models/llama8b", "args": ["--kv-cache-memory-bytes", "4294967296"],
        "traffic": [{"name": "tight", "requests": [[arrival_s, prompt_tokens, output_tokens], ...]}]}
Writes to $OUT for each traffic: NAME.requests.jsonl (a recording as docs/traces.md describes it, with stamps of the client's
clock), NAME.series.csv (a row a second) and NAME.metrics.txt (the server's page afterwards); and for each server its log.
Weights are dummies: how long a step takes does not depend on them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

OUT = Path(os.environ.get("OUT", "."))
BASE = "http://127.0.0.1:8123"
WAIT_S = 400
SERIES = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
)


async def page(session: aiohttp.ClientSession) -> str:
    """The metrics as the server shows them."""
    async with session.get(BASE + "/metrics") as response:
        return str(await response.text())


def value(text: str, metric: str) -> float:
    """The sum over all rows of one metric."""
    rows = (line for line in text.splitlines() if re.match(rf"vllm:{metric}[{{ ]", line))
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows)


async def one(session: aiohttp.ClientSession, prompt: list[int], output: int) -> dict[str, Any]:
    """Send a request and read its answer as it comes."""
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
    sent, first, last, pieces = time.time_ns(), 0, 0, 0
    async with session.post(BASE + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = time.time_ns()
                first = first or last
                pieces += 1
    stamps = {"arrival": sent, "first_token": first, "finished": last}
    return {
        "schema": "plimsoll.request/1",
        "prompt_tokens": len(prompt),
        "cached_tokens": 0,
        "output_tokens": output,
        **{name: f"{at // 10**9}.{at % 10**9:09d}" for name, at in stamps.items()},
    }


def as_line(row: dict[str, Any]) -> str:
    """One JSON line; stamps are numbers with nine decimals, which a float would not keep."""
    parts = (
        f'"{name}": {said if name in ("arrival", "first_token", "finished") else json.dumps(said)}'
        for name, said in row.items()
    )
    return "{" + ", ".join(parts) + "}"


async def traffic(session: aiohttp.ClientSession, spec: dict[str, Any]) -> dict[str, Any]:
    """Send all requests of one traffic at their times; what the server did meanwhile, second by second."""
    dice = random.Random(spec.get("seed", 0))
    prompts = [[dice.randrange(3, 2000) for _ in range(prompt)] for _, prompt, _ in spec["requests"]]
    begin = time.time() + 1.0
    done = asyncio.Event()
    rows: list[str] = ["t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"]

    async def sample() -> None:
        before: list[float] | None = None
        while not done.is_set():
            text = await page(session)
            now = [value(text, name) for name in SERIES]
            if before is not None:
                rows.append(
                    f"{time.time() - begin:.3f},{now[0] - before[0]:.0f},{now[1] - before[1]:.0f},{now[2]:.0f},{now[3]:.0f},"
                    f"{100 * now[4]:.2f}"
                )
            before = now
            await asyncio.sleep(1.0)

    async def later(number: int) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, begin + spec["requests"][number][0] - time.time()))
        return await one(session, prompts[number], spec["requests"][number][2])

    sampler = asyncio.create_task(sample())
    found = await asyncio.gather(*(later(number) for number in range(len(prompts))))
    done.set()
    await sampler
    name = spec["name"]
    (OUT / f"{name}.requests.jsonl").write_text("".join(as_line(row) + "\n" for row in found))
    (OUT / f"{name}.series.csv").write_text("\n".join(rows) + "\n")
    text = await page(session)
    (OUT / f"{name}.metrics.txt").write_text(text)
    return {"name": name, "seconds": round(time.time() - begin, 2), "preemptions": value(text, "num_preemptions_total")}


async def serve(run: dict[str, Any]) -> None:
    """Start a server, warm it up, send it all its traffic, stop it."""
    log = OUT / f"{run['name']}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", run["model"], "--served-model-name", "m"]
    command += ["--load-format", "dummy", "--host", "127.0.0.1", "--port", "8123", *run.get("args", [])]
    with log.open("w") as said:
        server = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    limits = aiohttp.ClientTimeout(total=900)
    try:
        async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
            start = time.monotonic()
            while time.monotonic() - start < WAIT_S and server.poll() is None:
                await asyncio.sleep(1.0)
                try:
                    async with session.get(BASE + "/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    continue
            print(f"{run['name']}: ready after {time.monotonic() - start:.0f} s", flush=True)
            dice = random.Random(1)
            warm = [[dice.randrange(3, 2000) for _ in range(64 * (n + 1))] for n in range(24)]
            await asyncio.gather(*(one(session, prompt, 48) for prompt in warm))
            for spec in run["traffic"]:
                print(json.dumps(await traffic(session, spec)), flush=True)
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        asyncio.run(serve(entry))
