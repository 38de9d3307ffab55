"""What `plimsoll.inside` costs a real server: on and off in turn in one and the same process, on vLLM's CPU build.

    python -m benchmarks.inside_overhead [--pairs 100] [--seconds 1.5] [--clients 1]

One server; `lab/engine/switching` switches probe, gate and recorder off and on between turns of streaming requests, in the
order on, off, off, on, ... Two servers side by side cannot be compared here: vLLM's processes spin for a while after
work, and on two cores the one that rests slows the other by a factor of two; stopping it with a signal is no better.
One client at a time by default: the engine then steps once for every token, which is where what runs inside each step
weighs most. Needs the engine: `python -m lab.engine.install`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.engine.clients import ask, complete, is_finished
from lab.engine.install import installed
from lab.engine.server import EngineServer
from lab.paired import Loss, alternate, loss_of

ROOT = Path(__file__).parents[1]
PAIRS, SECONDS, CLIENTS, TOKENS = 100, 1.5, 1, 64
LOSS_PROMISED = 0.03
TOKEN = "a-token-for-the-benchmark"
FLAGS = (
    "--worker-extension-cls", "switching.SwitchedProbe",
    "--middleware", "plimsoll.inside.Gate", "--middleware", "switching.Switch",
)  # fmt: skip


def environment(folder: str) -> dict[str, str]:
    """Everything of ours on, and one thread for the model: two would wait for each other at every layer."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "lab" / "engine" / "switching")))
    record = {"PLIMSOLL_RECORD": folder, "PLIMSOLL_RECORD_PREFIXES": "1"}
    return {"PYTHONPATH": paths, "PLIMSOLL_TOKEN": TOKEN, "VLLM_CPU_OMP_THREADS_BIND": "0", **record}


async def serve(port: int, seconds: float, clients: int) -> float:
    """Tokens a second: each client asks again as soon as it was answered, and what is begun is read to its end."""
    began = time.perf_counter()

    async def client(name: int) -> int:
        done = 0
        while time.perf_counter() - began < seconds:
            told = await complete(port, TOKENS, stream=True, prompt=f"tale {name} {time.monotonic_ns()}")
            assert is_finished(told), told
            done += TOKENS
        return done

    tokens = sum(await asyncio.gather(*(client(name) for name in range(clients))))
    return tokens / (time.perf_counter() - began)


def turn(server: EngineServer, seconds: float, clients: int, *, is_on: bool) -> float:
    """Switch, and serve."""
    told = asyncio.run(ask(server.port, f"/switch?on={int(is_on)}", {}))
    assert told.status == 200, told
    asyncio.run(serve(server.port, 0.3, clients))  # the first requests find everything in its place
    return asyncio.run(serve(server.port, seconds, clients))


def measure(pairs: int, seconds: float, clients: int) -> tuple[Loss, dict[str, Any]]:
    """The loss, and what the gate says of itself at the end."""
    with tempfile.TemporaryDirectory() as folder, EngineServer(FLAGS, environment(folder)) as server:
        server.wait_ready()
        for is_on in (True, False, True):
            turn(server, seconds, clients, is_on=is_on)

        def run(number: int, *, is_on: bool) -> float:
            rate = turn(server, seconds, clients, is_on=is_on)
            print(f"  pair {number + 1:2} {'with' if is_on else 'without':8} {rate:7.1f} tokens/s", flush=True)
            return rate

        rates = alternate(pairs, lambda n: run(n, is_on=True), lambda n: run(n, is_on=False))
        turn(server, 1.0, clients, is_on=True)
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        state: dict[str, Any] = asyncio.run(ask(server.port, "/plimsoll/state", None, bearer)).json()
        return loss_of(rates), state


def main() -> None:
    """Print every turn and the bound; exit 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each turn")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("inside_overhead.py") else [])
    if not installed():
        raise SystemExit("the real engine is not here: python -m lab.engine.install")
    print(f"load of the machine before this began: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    loss, state = measure(options.pairs, options.seconds, options.clients)
    print("with/without, pair by pair: " + " ".join(f"{ratio:.4f}" for ratio in loss.ratios))
    print(loss)
    print(f"recorded: {state['recorder']}; workers: {state['workers']}; faults of ours: {state['faults']}")
    if loss.upper is None or loss.upper > LOSS_PROMISED:
        raise SystemExit(f"promise broken: the loss stays below {LOSS_PROMISED:.0%}")


if __name__ == "__main__":
    main()
