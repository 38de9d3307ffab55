"""Knobs on a real GPU: turned at random under load with both runners, and a burst with and without what the replay advises.

    python3 -m lab.gpu.knobs --work DIR [--until 470]        # a host with vLLM 0.25.1 and a GPU, src on PYTHONPATH
    .venv/bin/python -m lab.gpu.knobs --work DIR --cpu        # a dry run on the CPU engine

Three parts; each result is written to $OUT as soon as it is there:

    turns-RUNNER.json   asynchronous scheduling, CUDA graphs, few blocks: knobs turned at random while 48 clients read streams
    burst.json          64 requests: the flags as they are, then what a guard beside the server advises, set with its
                        `guardctl set`; then both again in the other order. The forecast stands beside what came.
    steps.json          two traffics, each with several values of max-num-batched-tokens, set as a knob in one server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from lab.arrivals import Traffic, send, summary
from lab.gpu.inside_server import TOKEN, ask
from lab.gpu.models import make_models
from lab.gpu.provoke_failures import HERE
from lab.gpu.service_bench import WARM_UP, total
from lab.gpu.survive_host import REACH_S, Host, Server
from lab.streams import Shape, Streams, failures
from lab.streams import summary as streamed
from plimsoll.demo.balancer import HOST
from plimsoll.demo.fleet import Guard
from plimsoll.simulate.advice import Promise, advise
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.simulate.trace_files import read_measured

MODEL = "llama-3.1-8b"
PROMISE = Promise(10.0, 0.1)
TURN_S = 40.0
BURST = Traffic(64, (8000, 30000), (100, 400), per_s=2.5)
# A chat that keeps the card busy, and documents with short answers: each wants other steps.
STEPS = {
    "chat": (Traffic(240, (200, 2000), (80, 240), per_s=16.0, seed=3), (512, 1024, 2048, 8192, 24576)),
    "documents": (Traffic(32, (8000, 30000), (20, 120), per_s=2.0, seed=4), (512, 2048, 8192, 24576)),
}
ADVICE_WAIT_S = 60.0
GUARD = """\
[api]
listen = "{host}:{port}"
token_file = "api.token"
[act]
journal = "state/guard.journal"
[promise]
ttft = "{ttft}s"
tpot = "{tpot}s"
every = "10s"
[[engine]]
name = "burst"
url = "http://{host}:{engine}"
token_file = "gate.token"
recording = "{recording}"
"""
# Few blocks, so that requests are preempted.
TURN_FLAGS = (
    "--max-model-len", "8192", "--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.05",
    "--max-num-seqs", "64", "--max-num-batched-tokens", "4096",
)  # fmt: skip
BURST_FLAGS = (
    "--dtype", "bfloat16", "--enable-chunked-prefill", "--gpu-memory-utilization", "0.88", "--max-model-len", "32768",
    "--max-num-seqs", "64", "--max-num-batched-tokens", "24576", "--block-size", "16",
)  # fmt: skip
RUNNERS = {"first": "0", "second": "1"}
TURN_SHAPE = Shape(48, (64, 1200), (64, 256), long_prompt=(3000, 7000), long_every=8)
CPU_SHAPE = Shape(8, (8, 40), (8, 24), long_prompt=(200, 400), long_every=8)


class Bench:
    """The servers of one run, and where results go."""

    def __init__(self, work: Path, *, is_cpu: bool, until: float) -> None:
        self.is_cpu, self.end = is_cpu, time.monotonic() + until
        self.out = Path(os.environ.get("OUT", str(work / "out")))
        self.out.mkdir(parents=True, exist_ok=True)
        self.host = Host(work, is_cpu=is_cpu)
        if not is_cpu:
            make_models(json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))["models"], work / "models")
        self.servers: dict[str, Server] = {}

    def begin(self, name: str, flags: tuple[str, ...], env: dict[str, str]) -> Server:
        """Start one; it waits before it takes memory."""
        record = {"PLIMSOLL_RECORD": str(self.host.work / f"record-{name}")}
        cpu_flags = ("--num-gpu-blocks-override", "40", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
        model = self.host.model_folder(MODEL)
        server = Server(self.host, name, model, cpu_flags if self.is_cpu else flags, record | env, is_ours=True)
        self.servers[name] = server
        return server

    def ready(self, *names: str) -> None:
        """Let these through and wait until they serve."""
        for name in names:
            if not self.is_cpu:
                self.servers[name].wait_gate(min(self.end, time.monotonic() + REACH_S))
            self.servers[name].open()
        for name in names:
            if not self.servers[name].wait_ready(self.end):
                raise RuntimeError(f"{name} is not ready:\n{self.servers[name].text()[-3000:]}")
            asyncio.run(send(self.servers[name].port, self.host.model_name, self.scaled(WARM_UP)))

    def scaled(self, traffic: Traffic) -> Traffic:
        """The traffic itself; on a CPU a small one."""
        if not self.is_cpu:
            return traffic
        return traffic._replace(
            requests=min(24, traffic.requests), prompt=(8, 60), output=(8, 24), per_s=traffic.per_s and 12.0
        )

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Put one result where it is fetched from, and a line of it on the screen."""
        (self.out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")
        print(
            name,
            json.dumps({key: value for key, value in result.items() if not isinstance(value, list)}, default=str)[:700],
            flush=True,
        )

    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()

    def stop(self, *names: str) -> None:
        """End these servers, keep their logs, and wait for their memory."""
        for name in names:
            server = self.servers.pop(name)
            server.end()
            (self.out / f"{name}.log").write_text(server.trimmed()[-60_000:], encoding="utf-8")
        if not self.servers or not self.is_cpu:
            self.host.wait_empty()


# Part one: turned at random


def turn_at_random(bench: Bench, name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Clients read streams while orders come as fast as they are answered; all that was asked for must arrive."""
    server, dice = bench.servers[name], random.Random(seed)
    port = server.port
    _, before = ask(port, "GET", "/metrics")
    status, told = ask(port, "GET", "/plimsoll/knobs")
    if status != 200:
        raise RuntimeError(f"no knobs: {told}")
    start = {knob: row["start"] for knob, row in told["knobs"].items() if not row["why_not"] and row["start"] is not None}
    shape = CPU_SHAPE if bench.is_cpu else TURN_SHAPE
    turns, refused, answer_s = 0, [], []
    with Streams(port, bench.host.model_name, shape, seconds, seed) as streams:
        while time.monotonic() < streams.end:
            values = {
                "max-num-seqs": dice.randint(1, int(start["max-num-seqs"])),
                "max-num-batched-tokens": dice.randint(16, int(start["max-num-batched-tokens"])),
                "kv-headroom": round(dice.uniform(0, 0.5), 3),
                "long-prefill-token-threshold": dice.randint(16, min(2048, int(start["max-num-batched-tokens"]))),
            }
            chosen = [knob for knob in dice.sample(sorted(values), dice.randint(0, 3)) if knob in start]
            order = {"lease_s": dice.choice((0.1, 0.5, 30.0)), **{knob: values[knob] for knob in chosen}}
            began = time.monotonic()
            status, told = ask(port, "POST", "/plimsoll/knobs", 60.0, order)
            answer_s.append(time.monotonic() - began)
            turns += 1
            if status != 200:
                refused.append([order, told])
            time.sleep(dice.uniform(0.0, 0.1))
        ask(port, "POST", "/plimsoll/knobs", 60.0, {})
        answers = streams.finish()
    _, after = ask(port, "GET", "/metrics")
    _, told = ask(port, "GET", "/plimsoll/knobs")
    answer_s.sort()
    return {
        "server": name, "vllm": _version(server), "turns": turns, "refused": refused[:3], "is_alive": server.is_healthy(),
        "order_p50_s": round(answer_s[len(answer_s) // 2], 4), "order_max_s": round(answer_s[-1], 3),
        "requests": len(answers), "wrong": failures(answers)[:5], "failed": len(failures(answers)),
        **{f"streams_{key}": value for key, value in streamed(answers, streams.begin, streams.end).items()},
        "preemptions": total(after, "num_preemptions_total") - total(before, "num_preemptions_total"),
        "left_running": total(after, "num_requests_running"), "kv_usage_after": total(after, "kv_cache_usage_perc"),
        "in_force_after": {knob: row["in_force"] for knob, row in told["knobs"].items()}, "start": start,
    }  # fmt: skip


def _version(server: Server) -> str:
    status, told = ask(server.port, "GET", "/version")
    return str(told.get("version")) if status == 200 and isinstance(told, dict) else "unknown"


# Part two: the burst


def limits_of(server: Server, told: dict[str, Any], max_len: int, *, is_async: bool) -> EngineLimits:
    """The engine as the simulator needs it: from its metrics page and its knobs."""
    _, page = ask(server.port, "GET", "/metrics")
    blocks = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', page)
    size = re.search(r'vllm:cache_config_info\{[^}]*block_size="(\d+)"', page)
    assert blocks is not None
    assert size is not None
    knobs = told["knobs"]
    return EngineLimits(
        num_blocks=int(blocks[1]), block_size=int(size[1]), max_num_seqs=int(knobs["max-num-seqs"]["start"]),
        max_num_batched_tokens=int(knobs["max-num-batched-tokens"]["start"]), max_model_len=max_len, async_scheduling=is_async,
    )  # fmt: skip


def play_burst(bench: Bench, server: Server, label: str, words: int) -> dict[str, Any]:
    """One burst: what became of its requests."""
    _, before = ask(server.port, "GET", "/metrics")
    began = time.time()
    outcomes = asyncio.run(send(server.port, bench.host.model_name, bench.scaled(BURST)._replace(words=words)))
    _, after = ask(server.port, "GET", "/metrics")
    _, told = ask(server.port, "GET", "/plimsoll/knobs")
    return {
        "burst": label, "began": began, **summary(outcomes, PROMISE.ttft_s, PROMISE.tpot_s),
        "preemptions": total(after, "num_preemptions_total") - total(before, "num_preemptions_total"),
        "most_running": told["since_order"]["most_running"], "largest_step": told["since_order"]["largest_step"],
        "in_force": told["knobs"]["max-num-seqs"]["in_force"],
    }  # fmt: skip


class Watch:
    """A guard beside one server: what it advises, and `guardctl` against it."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.folder = bench.host.work / "guard"
        self.folder.mkdir(exist_ok=True)
        self._guard = Guard(self.folder)
        for kept, token in (("gate", TOKEN), ("api", self._guard.token)):
            (self.folder / f"{kept}.token").touch(mode=0o600)
            (self.folder / f"{kept}.token").write_text(token, encoding="ascii")
        config = self.folder / "plimsoll.toml"
        made = {"host": HOST, "port": self._guard.port, "engine": bench.servers[name].port}
        made |= {"ttft": PROMISE.ttft_s, "tpot": PROMISE.tpot_s, "recording": bench.host.work / f"record-{name}"}
        config.write_text(GUARD.format(**made), encoding="utf-8")
        words = [sys.executable, "-m", "plimsoll", "guard", "--config", str(config), "--act", "--json"]
        with (self.folder / "guard.said").open("wb") as said:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)

    def ctl(self, *words: str) -> tuple[int, str]:
        """`guardctl`: its exit code and what it printed."""
        command = [sys.executable, "-m", "plimsoll", "guardctl", *words, "--at", f"http://{HOST}:{self._guard.port}"]
        command += ["--token-file", str(self.folder / "api.token")]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60.0, check=False)
        return ran.returncode, (ran.stdout + ran.stderr).strip()

    def advice(self) -> str:
        """What stands beside the engine in `guardctl status`; empty where nothing came in time."""
        end = time.monotonic() + ADVICE_WAIT_S
        while time.monotonic() < end:
            _, told = self.ctl("status", "--json")
            if found := re.search(r"with [\w-]+ \d+, [^\"]*?--for \w+", told):
                return found[0]
            time.sleep(1.0)
        return ""

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(10.0)


def recorded(bench: Bench, name: str, began: float) -> Path:
    """What the server's own recorder wrote since then."""
    time.sleep(1.5)  # the recorder writes in a thread of its own
    folder = bench.host.work / f"record-{name}"
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    fresh = [line for line in lines if json.loads(line).get("arrival", 0.0) >= began]
    path = bench.out / f"{name}-recorded.jsonl"
    path.write_text("".join(f"{line}\n" for line in fresh), encoding="utf-8")
    return path


def burst(bench: Bench) -> dict[str, Any]:
    """The flags as they are, then the advice set by guard in the running server; then both again in the other order."""
    server = bench.servers["burst"]
    _, told = ask(server.port, "GET", "/plimsoll/knobs")
    limits = limits_of(server, told, 32768, is_async=not bench.is_cpu)
    result: dict[str, Any] = {
        "vllm": _version(server),
        "limits": limits._asdict(),
        "promise_s": [PROMISE.ttft_s, PROMISE.tpot_s],
    }
    runs: list[dict[str, Any]] = []
    watch = Watch(bench, "burst")
    try:
        first = play_burst(bench, server, "as started 1", 1)
        runs.append(first)
        began = time.monotonic()
        result["guard_advice"] = watch.advice()
        result["guard_advice_s"] = round(time.monotonic() - began, 2)
        advice = advise(read_measured(str(recorded(bench, "burst", first["began"]))), limits, PROMISE)
        result |= {"advice": advice.sentence(), "forecast": advice.kept, "replayed": advice.replayed, "clock": advice.clock,
                   "tried": list(advice.tried), "bursts": runs}  # fmt: skip
        bench.write("burst", result)
        given = re.search(r"guardctl set burst (\S+=\d+)", result["guard_advice"])
        value = advice.value or max(1, limits.max_num_seqs * 3 // 8)
        order = given[1] if given else f"{advice.knob or 'max-num-seqs'}={value}"
        result["set"] = order + ("" if given else " (not advised by guard: a try all the same)")
        took_s = max(20.0, first["seconds"] + 5)
        for label, words, is_set in (("set 1", 2, True), ("set 2", 3, True), ("as started 2", 4, False)):
            if bench.left() < took_s * 1.3 + 10:
                break
            verb = (order, "--for", "10m") if is_set else ("--clear",)
            code, said = watch.ctl("set", "burst", *verb)
            result.setdefault("guardctl", []).append([" ".join(verb), code, said[:300]])
            runs.append(play_burst(bench, server, label, words))
            bench.write("burst", result)
    finally:
        watch.end()
        (bench.out / "guard.said").write_bytes((watch.folder / "guard.said").read_bytes()[-60_000:])
    for one in runs:
        print(
            one["burst"],
            {key: one[key] for key in ("good", "served", "failed", "output_tokens_per_s", "most_running", "in_force")},
            flush=True,
        )
    return result


# Part three: how many tokens a step


def steps(bench: Bench) -> dict[str, Any]:
    """Every traffic with every value of max-num-batched-tokens; the server was started with the largest."""
    server = bench.servers["burst"]
    _, told = ask(server.port, "GET", "/plimsoll/knobs")
    limits = limits_of(server, told, 32768, is_async=not bench.is_cpu)
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {"vllm": _version(server), "limits": limits._asdict(), "runs": runs}
    for number, (name, (traffic, values)) in enumerate(STEPS.items()):
        for turn, value in enumerate(values):
            longest = max((run["seconds"] for run in runs if run["traffic"] == name), default=30.0)
            if bench.left() < longest * 1.3 + 10:
                continue
            order = {"max-num-batched-tokens": min(value, limits.max_num_batched_tokens), "lease_s": 600}
            status, told = ask(server.port, "POST", "/plimsoll/knobs", 60.0, order)
            assert status == 200, told
            scaled = bench.scaled(traffic)._replace(words=20 + 10 * number + turn)
            outcomes = asyncio.run(send(server.port, bench.host.model_name, scaled))
            stamps = [
                [round(one.arrival - outcomes[0].arrival, 4), one.prompt, one.output, one.ttft_s, one.tpot_s]
                for one in outcomes
            ]
            run = {"traffic": name, "value": value, **summary(outcomes, 2.0, 0.05), "requests_seen": stamps}
            runs.append(run)
            bench.write("steps", result)
            print(name, value, {key: run[key] for key in ("seconds", "good", "failed", "ttft_ms", "tpot_ms")}, flush=True)
    return result


def warm_replay() -> None:
    """Have the simulator compiled while servers start."""
    trace = make_trace("warm", [0] * 4, [40] * 4, [4] * 4, [0] * 4, [[]] * 4, 16)
    replay(trace, EngineLimits(async_scheduling=True), StepTime(), on_steps=lambda _rows: None)


def main(arguments: list[str]) -> int:
    """Both parts, whatever becomes of the first."""
    parser = argparse.ArgumentParser(description="Turn the knobs of a vLLM on this host's GPU.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--until", type=float, default=470.0, help="seconds for all of it")
    parser.add_argument("--turn-s", type=float, default=TURN_S)
    parser.add_argument("--parts", default="turns,burst,steps")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    bench, parts = Bench(work, is_cpu=options.cpu, until=options.until), options.parts.split(",")
    threading.Thread(target=warm_replay, daemon=True).start()
    failed = 0
    try:
        names = [f"turns-{runner}" for runner in RUNNERS] if "turns" in parts else []
        names = names[:1] if options.cpu else names
        for name in names:
            bench.begin(name, TURN_FLAGS, {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[name.removeprefix("turns-")]})
        timed = [part for part in (burst, steps) if part.__name__ in parts]
        if timed and not options.cpu:
            bench.begin("burst", BURST_FLAGS, {})
        if names:
            failed += _turn_all(bench, names, options.turn_s)
        if timed:
            if options.cpu:
                bench.begin("burst", BURST_FLAGS, {})
            bench.ready("burst")
            for part in timed:
                bench.write(part.__name__, part(bench))
    except Exception:
        failed += 1
        traceback.print_exc()
    finally:
        bench.stop(*list(bench.servers))
    return int(failed > 0)


def _turn_all(bench: Bench, names: list[str], seconds: float) -> int:
    """All of them at once: they share the card, and nothing is timed."""
    try:
        bench.ready(*names)
        results: dict[str, dict[str, Any]] = {}
        threads = [
            threading.Thread(
                target=lambda name=name, seed=seed: results.update({name: turn_at_random(bench, name, seconds, seed)})
            )
            for seed, name in enumerate(names, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, result in results.items():
            bench.write(name, result)
        return int(len(results) < len(names) or any(result["failed"] or not result["is_alive"] for result in results.values()))
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        bench.stop(*names)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
