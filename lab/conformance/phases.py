"""What the script does with each server, one function for each part of the recording."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Collection, Iterable
from typing import Any

from lab.conformance.cases import API_KEY, BEARER, KEY, KEYED, MODEL, REQUESTS, TOKEN, Case, long_answer
from lab.conformance.client import LIMIT_S, Ask, InFlight, Seen, see, see_together
from lab.conformance.metrics import difference, families, numbers
from lab.conformance.servers import ROOT, Server, Starter
from lab.conformance.shapes import ANY, FREE, KIND, LARGE, folded, is_answer, kind
from lab.engine.install import model_home

GATE = ("--middleware", "plimsoll.inside.Gate", "--worker-extension-cls", "plimsoll.inside.Probe")
ENV = {"PYTHONPATH": str(ROOT / "src"), "PLIMSOLL_TOKEN": TOKEN}
START_LIMIT_S = 300.0
LONG = 1900  # tokens: nearly the whole context
FEW_BLOCKS = ("--num-gpu-blocks-override", "18", "--max-num-seqs", "8")
PRODUCED = ("completion_tokens", "total_tokens")  # of an answer that was cut short
LEASE = ("lease_left_s", "since_s")
HEALTH = Ask("GET", "/health")


def main_server(start: Starter) -> dict[str, Any]:
    """The server most questions go to; at the end it gets SIGTERM with requests in flight."""
    with start(GATE, ENV, dev_mode=True, may_oom=False) as server:
        server.wait_ready()
        return {
            "counters": counters(server),
            "requests": answers(server, REQUESTS),
            "kept": kept_by_pause(server),
            "aborted": aborted(server),
            "gate": gate(server),
            "metrics": metrics(server),
            "sigterm": sigterm(server),
        }


def keyed_server(start: Starter) -> dict[str, Any]:
    """A server as in production: a key, no development mode, and time to finish at SIGTERM."""
    with start(("--api-key", API_KEY, "--shutdown-timeout", "60"), {}, dev_mode=False, may_oom=False) as server:
        server.wait_ready()
        found = {"requests": answers(server, KEYED)}
        return {**found, "sigterm": draining_sigterm(server, KEY)}


def answers(server: Server, cases: Iterable[Case]) -> dict[str, Seen]:
    """The answer to each question, asked one after another."""
    found: dict[str, Seen] = {}
    for case in cases:
        number = next(n for n in itertools.count(1) if f"{case.name} ({n})" not in found and (n > 1 or case.name not in found))
        name = case.name if number == 1 else f"{case.name} ({number})"
        found[name] = see(server.port, case.ask) | ({"free": list(case.free)} if case.free else {})
    return found


def freed(seen: Seen, *free: str) -> Seen:
    """The same answer, of which these values do not count."""
    return {**seen, "free": list(free)}


def tidied(value: Any, free: Collection[str] = ()) -> Any:
    """A recording as it is kept: streams folded, large free values as their kind, no path of this machine."""
    if isinstance(value, dict):
        own = value.get("free", ()) if is_answer(value) else free
        found = {key: tidied(one, own) if _is_kept(key, one, own) else f"{KIND}{kind(one)}" for key, one in value.items()}
        return {**found, "events": tidied(folded(value["events"], own), own)} if "events" in value else found
    if isinstance(value, list):
        return [tidied(one, free) for one in value]
    return value.replace(str(model_home()), "MODEL") if isinstance(value, str) else value


def _is_kept(key: str, value: Any, free: Collection[str]) -> bool:
    is_free = key in free or (key in FREE and isinstance(value, str))
    return not is_free or len(str(value)) <= LARGE


# Counters


def counted(server: Server, asks: list[Ask], *, together: bool = False) -> dict[str, float]:
    """By how much each counter moved while these were answered."""
    before = numbers(_settled_page(server))
    seen = see_together(server.port, asks) if together else [see(server.port, ask) for ask in asks]
    assert all(one["status"] == 200 for one in seen), seen
    return difference(before, numbers(_settled_page(server)))


def _settled_page(server: Server) -> str:
    """The page once the figures of what was answered last are on it."""
    time.sleep(0.5)
    text: str = see(server.port, Ask("GET", "/metrics"))["page"]
    return text


def counters(server: Server) -> dict[str, dict[str, float]]:
    """Prompts that share beginnings, one after another: every counter is then a fact of the requests alone."""

    def ask(prompt: list[int] | list[list[int]], tokens: int, **more: Any) -> Ask:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return Ask("POST", "/v1/completions", body | more)

    shared = [300 + n % 700 for n in range(1500)]
    other = [1100 + n % 700 for n in range(1500)]
    return {
        "one short": counted(server, [ask(shared[:40], 4)]),
        "less than a block, twice": counted(server, [ask(other[:127], 1)] * 2),
        "exactly two blocks, twice": counted(server, [ask(other[:256], 3)] * 2),
        "two blocks and one token, twice": counted(server, [ask(shared[:257], 3)] * 2),
        "growing": counted(server, [ask(shared[:size], 2) for size in (300, 600, 900, 1200, 1500)]),
        "answers across blocks": counted(server, [ask([50, *shared[:120]], 300)] * 2),
        "n=3": counted(server, [ask([60, *shared[:400]], 5, n=3, temperature=1, seed=1)]),
        "two prompts": counted(server, [ask([[70, *shared[:200]], [80, *shared[:200]]], 5)]),
    }


def small_server(start: Starter) -> dict[str, Any]:
    """Eighteen blocks, six requests of 900 tokens: they do not fit together. Once held until all are there, once not."""
    asks = [long_answer(900, stream=False, first_id=400 + n) for n in range(6)]
    with start(FEW_BLOCKS, {}, dev_mode=True, may_oom=False) as server:
        server.wait_ready()
        before = numbers(_settled_page(server))
        see(server.port, Ask("POST", "/pause?mode=keep"))
        flights = [InFlight(server.port, asks[0])]
        for ask in asks[1:]:
            time.sleep(0.2)
            flights.append(InFlight(server.port, ask))
        time.sleep(0.5)
        see(server.port, Ask("POST", "/resume"))
        statuses = [flight.result()["status"] for flight in flights]
        held = difference(before, numbers(_settled_page(server)))
        see(server.port, Ask("POST", "/reset_prefix_cache"))
        later = [long_answer(900, stream=False, first_id=500 + n) for n in range(6)]
        return {"statuses": statuses, "held": held, "at once": counted(server, later, together=True)}


def metrics(server: Server) -> dict[str, Any]:
    """The page: its headers, and every family with type, help, label names and values."""
    seen = see(server.port, Ask("GET", "/metrics"))
    return {"answer": freed(seen, "page"), "families": families(seen["page"])}


# Requests in flight


def kept_by_pause(server: Server) -> dict[str, Any]:
    """A stream that is frozen by /pause?mode=keep, a request that comes meanwhile, and both after /resume."""
    stream = InFlight(server.port, long_answer(400, stream=True, first_id=600))
    stream.begun.wait()
    paused = see(server.port, Ask("POST", "/pause?mode=keep"))
    late = InFlight(server.port, long_answer(4, stream=False, first_id=601))
    time.sleep(1.0)
    during = {
        "stream is over": stream.is_over,
        "late is over": late.is_over,
        "health": see(server.port, HEALTH)["status"],
        "is_paused": see(server.port, Ask("GET", "/is_paused"))["json"],
    }
    see(server.port, Ask("POST", "/resume"))
    return {"pause": paused, "during": during, "stream": stream.result(), "late": late.result()}


def aborted(server: Server) -> dict[str, Any]:
    """What clients get whose requests a pause aborts; a pause that waits for one; a reset of the cache meanwhile."""
    found: dict[str, Any] = {}
    for name, path in (
        ("pause", "/pause?mode=abort"),
        ("wait", "/pause?mode=wait"),
        ("reset_prefix_cache", "/reset_prefix_cache"),
    ):
        tokens = 400 if name == "wait" else LONG
        flights = [InFlight(server.port, long_answer(tokens, stream=n == 0, first_id=610 + n)) for n in range(2)]
        flights[0].begun.wait()
        time.sleep(0.1)
        answer = see(server.port, Ask("POST", path))
        if name == "reset_prefix_cache":
            see(server.port, Ask("POST", "/pause?mode=abort"))
        see(server.port, Ask("POST", "/resume"))
        stream, whole = (flight.result() for flight in flights)
        found[name] = {"answer": answer, "stream": stream, "whole": freed(whole, *(() if name == "wait" else PRODUCED))}
    return found


def gate(server: Server) -> dict[str, Any]:
    """The gate's endpoints, and a drain with a stream in flight."""

    def own(path: str, body: Any = None, *, token: bool = True) -> Seen:
        ask = Ask("GET" if body is None else "POST", f"/plimsoll/{path}", body, headers=BEARER if token else {})
        return see(server.port, ask)

    time.sleep(1.5)  # the gate looks once a second
    found = {
        "ready": own("ready", token=False),
        "state without token": own("state", token=False),
        "state": freed(own("state"), ANY),
        "memory": freed(own("memory"), ANY),
        "compact": freed(own("compact", {}), ANY),
        "nowhere": own("nowhere"),
    }
    stream = InFlight(server.port, long_answer(LONG, stream=True, first_id=620))
    stream.begun.wait()
    found["drain"] = freed(own("drain", {"refuse": True, "lease_s": 60}), *LEASE)
    refused = see(server.port, long_answer(1, stream=False, first_id=621))
    found |= {"new request": refused, "health in drain": see(server.port, HEALTH), "ready in drain": own("ready", token=False)}
    found["models in drain"] = see(server.port, Ask("GET", "/v1/models"))
    found["stream"] = stream.result()
    found["undrain"] = freed(own("undrain", {}), *LEASE)
    found["after"] = see(server.port, long_answer(1, stream=False, first_id=622))
    return found


def _two_long(server: Server, first_id: int, headers: dict[str, str], limit_s: float = LIMIT_S) -> tuple[InFlight, InFlight]:
    """A stream and a plain request in flight, the stream begun a moment ago."""
    stream, whole = (
        InFlight(server.port, long_answer(LONG, stream=n == 0, first_id=first_id + n, headers=headers), limit_s=limit_s)
        for n in range(2)
    )
    stream.begun.wait()
    time.sleep(0.1)
    return stream, whole


def sigterm(server: Server) -> dict[str, Any]:
    """SIGTERM without time to finish. Real clients get one of three ends, as the engine core dies after its last words or
    before, and as the API server notices or not: only the kind of end is kept."""
    flights = _two_long(server, 630, {}, limit_s=15)
    sent_s = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    ends = {name: end_of(flight.result()) for name, flight in zip(("stream", "whole"), flights, strict=True)}
    return {"ends": ends, "exit_code": server.wait_exit(120), "seconds": round(time.monotonic() - sent_s, 1)}


def draining_sigterm(server: Server, headers: dict[str, str]) -> dict[str, Any]:
    """SIGTERM with time to finish: questions while two requests are still in flight, then their ends."""
    flights = _two_long(server, 630, headers)
    sent_s = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    time.sleep(0.3)
    text = {"model": MODEL, "prompt": "may the ship be loaded", "max_tokens": 2}
    during = {
        "health": see(server.port, HEALTH),
        "completion of ids": see(server.port, long_answer(2, stream=False, first_id=632, headers=headers), limit_s=20),
        "stream of ids": see(server.port, long_answer(2, stream=True, first_id=633, headers=headers), limit_s=20),
        "completion of a text": see(server.port, Ask("POST", "/v1/completions", text, headers=headers), limit_s=20),
        "models": freed(see(server.port, Ask("GET", "/v1/models", headers=headers)), "root"),
        "metrics": freed(see(server.port, Ask("GET", "/metrics")), "page"),
        "requests are over": any(flight.is_over for flight in flights),
    }
    stream, whole = (flight.result() for flight in flights)
    exit_code = server.wait_exit(120)
    seconds = round(time.monotonic() - sent_s, 1)
    return {"during": during, "stream": stream, "whole": whole, "exit_code": exit_code, "seconds": seconds}


def end_of(seen: Seen) -> str:
    """How an answer ended, in a word or two: the finish reason, `error` and its code, `cut`, or `no answer`."""
    if not seen.get("whole"):
        return "cut" if seen["status"] else "no answer"
    bodies = [seen["json"]] if "json" in seen else [event for event in seen.get("events", ()) if isinstance(event, dict)]
    for body in reversed(bodies):
        if "error" in body:
            return f"error {body['error']['code']}"
        if body.get("choices"):
            return str(body["choices"][0]["finish_reason"])
    return f"status {seen['status']}"


def oom_server(start: Starter) -> dict[str, Any]:
    """A step that runs out of memory: what a stream and a plain request get, /health until the port closes, the exit code."""
    with start((), {}, dev_mode=True, may_oom=True) as server:
        server.wait_ready()
        server.await_oom()
        flights = _two_long(server, 640, {})
        server.order_oom()
        while end_of(flights[0].result()) == "length":  # until the death falls amid a stream
            flights = _two_long(server, 640, {})
        died_s = time.monotonic()
        health = set()
        while server.exit_code() is None:
            health.add(see(server.port, HEALTH, limit_s=20)["status"])
            time.sleep(0.02)
        stream, whole = (flight.result() for flight in flights)
        exit_code = server.wait_exit(120)
        seconds = round(time.monotonic() - died_s, 1)
        return {"stream": stream, "whole": whole, "maybe health": sorted(health), "exit_code": exit_code, "seconds": seconds}


# Starts that cannot succeed


def failing_starts(start: Starter) -> dict[str, Any]:
    """The exit codes of starts that end by themselves."""
    return {
        "unknown flag": _exit_of(start, ("--swap-space", "8")),
        "flag without a value": _exit_of(start, ("--max-num-seqs",)),
        "flag of the wrong type": _exit_of(start, ("--max-num-seqs", "many")),
        "too few blocks": _exit_of(start, ("--num-gpu-blocks-override", "4")),
        "longer than the model": _exit_of(start, ("--max-model-len", "100000")),
        "batch smaller than its sequences": _exit_of(start, ("--max-num-seqs", "64", "--max-num-batched-tokens", "32")),
    }


def _exit_of(start: Starter, flags: tuple[str, ...]) -> dict[str, Any]:
    with start(flags, {}, dev_mode=False, may_oom=False) as server:
        code = server.wait_exit(START_LIMIT_S)
        said = [line for line in server.log_text().splitlines() if "error:" in line or "Error:" in line]
        return {"exit_code": code, "said": said[-1][-200:] if said else ""}


PARTS = {"main": main_server, "keyed": keyed_server, "small": small_server, "oom": oom_server, "starts": failing_starts}
