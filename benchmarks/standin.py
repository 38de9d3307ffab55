"""What a stand-in carries: a thousand streams, its metrics page meanwhile, five hundred engines, a day on its own clock.

    python -m benchmarks.standin [streams|fleet|day]

The streams are read by clients in another process, from the stand-in and from a bare app under the same server that sends
pieces of the same size at the same pace: what that one cannot do on this machine, nobody can.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from lab.streams import Shape, Streams, percentile, summary

CLIENTS = 1_000
TOKENS = (200, 260)
SECONDS = 25.0
FLEET = 500
FIRST_PORT = 21_000
DAY_S = 86_400
LOOK_S = 5
BARE = """
import asyncio, json, sys
import uvicorn
PIECE = json.dumps({"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 179475854, "model": "m", "choices": [
    {"index": 0, "text": " gubagu", "logprobs": None, "finish_reason": None}], "system_fingerprint": "vllm-0.32.0-00000000"})
PIECE = b"data: " + PIECE.encode() + b"\\n\\n"
async def app(scope, receive, send):
    body = json.loads((await receive())["body"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(float(sys.argv[2]))
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    usage = b'data: {"usage": {"completion_tokens": %d}}\\n\\ndata: [DONE]\\n\\n' % body["max_tokens"]
    await send({"type": "http.response.body", "body": usage})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", lifespan="off")
"""


# Another process: in this one a thousand readers would be in the way of the clock.
WATCHER = """
import sys, time, urllib.request
while True:
    began = time.perf_counter()
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=30).read()
    print((time.perf_counter() - began) * 1000, flush=True)
    time.sleep(0.25)
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(words: list[str], port: int) -> subprocess.Popen[bytes]:
    """A server in a process of its own, once it accepts connections."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, f"it ended with {process.returncode}"
            time.sleep(0.1)
        else:
            return process
    raise TimeoutError(f"nobody listens on {port}")


def stopped(process: subprocess.Popen[bytes]) -> None:
    """End it."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_ms(port: int) -> float:
    """How long /metrics takes."""
    began = time.perf_counter()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
    return (time.perf_counter() - began) * 1000


def load(process: subprocess.Popen[bytes], port: int, model: str, *, has_page: bool) -> dict[str, float]:
    """A thousand clients, each with its next stream when the last has ended."""
    before, began = cpu_s(process.pid), time.monotonic()
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER, str(port)], stdout=subprocess.PIPE) if has_page else None
    with Streams(port, model, Shape(CLIENTS, (20, 40), TOKENS), SECONDS) as streams:
        time.sleep(max(0.0, streams.end - time.monotonic()))
        used = cpu_s(process.pid) - before
        passed = time.monotonic() - began
        answers = streams.finish()
    found = summary(answers, streams.begin + 5, streams.end)
    assert found["failed"] == 0, found["first_failures"]
    row = {"tokens_per_s": found["tokens_per_s"], "gap_p50_ms": found["gap_p50_ms"], "gap_p99_ms": found["gap_p99_ms"],
           "cores": used / passed, "resident_mb": resident_mb(process.pid), "requests": found["requests"]}  # fmt: skip
    if watcher is not None:
        watcher.kill()
        # As with the tokens, not while a thousand clients connect at once.
        pages = [float(line) for line in watcher.communicate()[0].split()][20:]
        row |= {"page_p50_ms": percentile(pages, 0.5) or 0.0, "page_p99_ms": percentile(pages, 0.99) or 0.0}
    return row


def streams() -> None:
    """A thousand streams at 20 tokens a second each, from the stand-in and from the bare app."""
    pace_s = 0.05
    flags = ["--gpu", "H200", "--base-ns", str(int(pace_s * 1e9)), "--token-ns", "0", "--seq-ns", "0", "--ctx-ps", "0",
             "--max-num-seqs", str(CLIENTS), "--disable-uvicorn-access-log"]  # fmt: skip
    rows = {}
    for name in ("bare app", "stand-in"):
        port = free_port()
        own = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port), *flags]
        process = started([sys.executable, "-c", BARE, str(port), str(pace_s)] if name == "bare app" else own, port)
        idle = [page_ms(port) for _ in range(50)] if name == "stand-in" else []
        rows[name] = load(process, port, "meta-llama/Llama-3.1-8B-Instruct", has_page=name == "stand-in")
        if idle:
            rows[name]["page_idle_p50_ms"] = percentile(idle, 0.5) or 0.0
        stopped(process)
        print(f"{name}: " + ", ".join(f"{key} {value:,.1f}" for key, value in rows[name].items()), flush=True)
    ratio = rows["stand-in"]["tokens_per_s"] / rows["bare app"]["tokens_per_s"]
    print(f"{CLIENTS} streams at once: {ratio:.2f} of the bare app's tokens a second, none failed")


def fleet() -> None:
    """Five hundred engines in one process: its memory at rest and after a request to each."""
    process = started(
        [sys.executable, "-m", "plimsoll", "standin", "--fleet", str(FLEET), "--port", str(FIRST_PORT)],
        FIRST_PORT + FLEET - 1,
    )
    time.sleep(1)
    print(f"{FLEET} engines at rest: {resident_mb(process.pid):.0f} MB", flush=True)
    body = b'{"model": "meta-llama/Llama-3.1-8B-Instruct", "prompt": "a load line", "max_tokens": 3}'
    for port in range(FIRST_PORT, FIRST_PORT + FLEET):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).read()
        page_ms(port)
    print(f"after a request and a page of each: {resident_mb(process.pid):.0f} MB")
    stopped(process)


def day() -> None:
    """A day of one engine on its own clock, looked at every five seconds."""
    import numpy as np

    from plimsoll.standin import stand_in

    dice = np.random.default_rng(1)
    for rate in (0.05, 0.5):
        engine = stand_in()
        arrivals = np.cumsum(dice.exponential(1 / rate, int(2 * DAY_S * rate)))
        arrivals = arrivals[arrivals < DAY_S]
        prompts, outputs = dice.integers(50, 1500, len(arrivals)), dice.integers(20, 300, len(arrivals))
        began, first = time.perf_counter(), 0
        for now in range(LOOK_S, DAY_S + 1, LOOK_S):
            last = int(np.searchsorted(arrivals, now))
            engine.send(arrivals[first:last].tolist(), prompts[first:last].tolist(), outputs[first:last].tolist())
            engine.until(float(now))
            first = last
        took = time.perf_counter() - began
        print(
            f"a day, {len(arrivals):,} requests, {engine.figures.steps:,} steps: {took:.1f} s, {DAY_S / took:,.0f} times real"
        )


PARTS: dict[str, Callable[[], None]] = {"streams": streams, "fleet": fleet, "day": day}


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    for name in (parser.parse_args().parts if __name__ == "__main__" else []) or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
