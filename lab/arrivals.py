"""Clients that come at set times, whether the server keeps up or not, and what became of each: an open loop.

A client that is told to wait (503 with Retry-After, as a server that sheds answers) waits as long and asks again, until it
is served or its patience ends. Stamps are of the wall clock, so that they can be held against the server's own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lab.streams import Answer, read_stream

RETRY_AFTER = re.compile(r"^retry-after:\s*(\d+)", re.IGNORECASE | re.MULTILINE)
LONGEST_S = 600.0


class Arrival(NamedTuple):
    """A request: when it comes, and how many tokens it has and wants."""

    at_s: float
    prompt: int
    output: int


class Traffic(NamedTuple):
    """Requests as a rule: the same rule and seed are the same requests."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    per_s: float | None = None
    """At random times, so many a second on average; None: all at once."""
    seed: int = 0
    patience_s: float = 0.0
    """For how long a client that is told to wait asks again; 0: it gives up at once."""
    words: int = 0
    """Another number is other prompts of the same lengths at the same times: no prefix cache knows them."""

    def arrivals(self) -> list[Arrival]:
        """All of them, in order."""
        dice = random.Random(self.seed)
        at_s, found = 0.0, []
        for _ in range(self.requests):
            at_s += dice.expovariate(self.per_s) if self.per_s else 0.0
            found.append(Arrival(round(at_s, 6), dice.randint(*self.prompt), dice.randint(*self.output)))
        return found


class Outcome(NamedTuple):
    """What became of one request: wall-clock stamps, None for what did not come."""

    arrival: float
    first_token: float | None
    finished: float | None
    prompt: int
    output: int
    told_to_wait: int
    wrong: str | None

    @property
    def ttft_s(self) -> float | None:
        """From the first time it asked."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot_s(self) -> float | None:
        """Between two tokens, on average; None for an answer of one token."""
        if self.first_token is None or self.finished is None or self.output < 2:
            return None
        return (self.finished - self.first_token) / (self.output - 1)


def body_of(model: str, arrival: Arrival, number: int, seed: int) -> bytes:
    """The request, with a prompt that begins like no other."""
    dice = random.Random(f"{seed} {number}")
    ids = [3 + number % 1900, 3 + number // 1900 % 1900, *(dice.randrange(3, 2000) for _ in range(arrival.prompt - 2))]
    body = {"model": model, "max_tokens": arrival.output, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "prompt": ids}  # fmt: skip
    text = json.dumps(body, separators=(",", ":")).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(text) + text


def bodies(model: str, traffic: Traffic) -> list[bytes]:
    """All requests of a rule, in their order."""
    seed = traffic.seed + 1_000_003 * traffic.words
    return [body_of(model, arrival, number, seed) for number, arrival in enumerate(traffic.arrivals())]


def must_wait_s(answer: Answer) -> float | None:
    """How long the server asks this client to wait; None for any other answer."""
    if answer.wrong is None or not answer.wrong.startswith("HTTP/1.1 503"):
        return None
    found = RETRY_AFTER.search(answer.wrong)
    return float(found[1]) if found else None


async def _one(port: int, request: bytes, arrival: Arrival, patience_s: float) -> Outcome:
    clock = time.time() - time.monotonic()
    came, told = time.monotonic(), 0
    while True:
        answer = await read_stream(port, request, arrival.output, LONGEST_S)
        wait_s = must_wait_s(answer)
        if wait_s is None:
            break
        told += 1
        if time.monotonic() + wait_s - came > patience_s:
            break
        await asyncio.sleep(wait_s)
    first, last = (answer.pieces[0], answer.pieces[-1]) if answer.pieces and answer.wrong is None else (None, None)
    return Outcome(
        came + clock, None if first is None else first + clock, None if last is None else last + clock,
        arrival.prompt, arrival.output, told, answer.wrong,
    )  # fmt: skip


async def send(port: int, model: str, traffic: Traffic) -> list[Outcome]:
    """Every request at its time; returns when the last one is over."""
    arrivals = traffic.arrivals()
    requests = bodies(model, traffic)
    begin = time.monotonic() + 0.5

    async def later(number: int) -> Outcome:
        await asyncio.sleep(max(0.0, begin + arrivals[number].at_s - time.monotonic()))
        return await _one(port, requests[number], arrivals[number], traffic.patience_s)

    return list(await asyncio.gather(*(later(number) for number in range(len(arrivals)))))


def summary(outcomes: Sequence[Outcome], ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """Durations, means and shares; `good` are those that were served within both promises."""
    served = [one for one in outcomes if one.wrong is None and one.finished is not None]
    firsts = sorted(one.ttft_s for one in served if one.ttft_s is not None)
    further = sorted(one.tpot_s for one in served if one.tpot_s is not None)
    begin = min(one.arrival for one in outcomes)
    end = max((one.finished for one in served if one.finished is not None), default=begin)
    good = [one for one in served if (one.ttft_s or 0.0) <= ttft_s and (one.tpot_s or 0.0) <= tpot_s]
    span = end - begin
    return {
        "requests": len(outcomes), "served": len(served), "failed": len(outcomes) - len(served), "seconds": round(span, 3),
        "requests_per_s": round(len(served) / span, 4) if span else None,
        "output_tokens_per_s": round(sum(one.output for one in served) / span, 2) if span else None,
        "good": len(good), "good_per_s": round(len(good) / span, 4) if span else None,
        "told_to_wait": sum(one.told_to_wait for one in outcomes),
        "ttft_ms": _spread(firsts), "tpot_ms": _spread(further),
        "first_failures": [one.wrong for one in outcomes if one.wrong is not None][:3],
    }  # fmt: skip


def _spread(ordered: Sequence[float]) -> dict[str, float] | None:
    if not ordered:
        return None
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(1e3 * value, 3) for name, value in {"mean": sum(ordered) / len(ordered), **at}.items()}


def as_recording(outcome: Outcome) -> str:
    """One line of a recording (docs/traces.md), with the client's stamps; only for what was served."""
    stamps = {"arrival": outcome.arrival, "first_token": outcome.first_token, "finished": outcome.finished}
    return json.dumps(
        {"schema": "plimsoll.request/1", "prompt_tokens": outcome.prompt, "cached_tokens": 0, "output_tokens": outcome.output}
        | {name: round(value, 6) for name, value in stamps.items() if value is not None}
    )
