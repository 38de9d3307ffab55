"""One round of traffic against a server that may run out of memory: bystanders stream, killers come among them.

Every request is greedy and says its token ids, so that two rounds can be compared token by token; each round's `salt` keeps
vLLM's prefix cache out of it. What asks for log-probabilities of its prompt is not streamed: vLLM refuses that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.gpu.load import picture

LIMIT_S = 60.0  # of one request: what has not ended by then is lost
PIECE = b"data: {"
REFUSED = (400, 413, 422, 429, 503)
# What containment says to the one request that cannot be served; vLLM's own words for a dead engine hold none of these.
ABORTED = ("plimsoll", "ran out of device memory")
Spec = Mapping[str, Any]


@dataclass
class Request:
    """One request as it is sent."""

    number: int
    is_killer: bool
    path: str
    body: dict[str, Any]
    wait_s: float
    """Seconds after the round's beginning."""
    asked: int
    """Output tokens."""
    is_unique: bool = False
    """No other round has it: its tokens are not to be compared."""


@dataclass
class Answer:
    """One request as it ended: `end` is served, refused, aborted or lost."""

    number: int
    is_killer: bool
    asked: int
    sent: float = 0.0
    over: float = 0.0
    status: int = 0
    pieces: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    end: str = "lost"
    wrong: str = ""
    is_unique: bool = False


# Requests


def requests_of(spec: Spec, model: str, salt: str) -> list[Request]:
    """Every request of a load; the same load makes the same requests, but for the salt and the model's name."""
    made: list[Request] = []
    for is_killer, part in ((False, spec.get("bystanders")), (True, spec.get("killers"))):
        if part is None:
            continue
        dice = random.Random(f"{spec.get('seed', 0)} {is_killer}")
        for _ in range(part["n"]):
            made.append(_request(len(made), part, dice, model, salt, is_killer=is_killer))
    return made


def _request(number: int, part: Spec, dice: random.Random, model: str, salt: str, *, is_killer: bool) -> Request:
    asked = dice.randint(*part["out"])
    extra = dict(part.get("extra", {}))
    is_streamed = "prompt_logprobs" not in extra
    body: dict[str, Any] = {"model": part.get("model", model), "max_tokens": asked, "ignore_eos": True, "temperature": 0}
    body |= {"return_token_ids": True, "cache_salt": salt, "stream": is_streamed}
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    if "side" in part:
        # vLLM keeps what it encoded: a picture that was seen before would not be encoded again.
        side = int(part["side"]) - zlib.crc32(salt.encode()) % 64 - number % 8
        image = {"type": "image_url", "image_url": {"url": picture(side)}}
        body["messages"] = [{"role": "user", "content": [image, {"type": "text", "text": f"ship {number}"}]}]
    else:
        body["prompt"] = [dice.randrange(3, 2000) for _ in range(dice.randint(*part["prompt"]))]
    path = "/v1/chat/completions" if "side" in part else "/v1/completions"
    return Request(number, is_killer, path, body | extra, float(part.get("after_s", 0.0)), asked, is_unique="side" in part)


# Sending and reading


class _Reading(asyncio.Protocol):
    """One connection with one request on it; keeps the whole answer, and when each piece of it came."""

    def __init__(self, request: bytes, over: asyncio.Future[None]) -> None:
        self._request, self._over = request, over
        self.pieces: list[float] = []
        self.chunks: list[bytes] = []
        self._seam = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        found = (self._seam + data).count(PIECE)
        if found:
            self.pieces += [time.monotonic()] * found
        self._seam = (self._seam + data)[-len(PIECE) + 1 :]
        self.chunks.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self._over.done():
            self._over.set_result(None)


def play(port: int, requests: Sequence[Request], limit_s: float = LIMIT_S) -> tuple[float, list[Answer]]:
    """Send them all, each at its time, and read every answer to its end; when the round began, and the answers in order."""
    bodies = [_http(request) for request in requests]

    async def whole() -> tuple[float, list[Answer]]:
        began = time.monotonic()
        one_each = (_send(port, request, body, began, limit_s) for request, body in zip(requests, bodies, strict=True))
        return began, list(await asyncio.gather(*one_each))

    return asyncio.run(whole())


def _http(request: Request) -> bytes:
    body = json.dumps(request.body, separators=(",", ":")).encode()
    head = f"POST {request.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _send(port: int, request: Request, body: bytes, began: float, limit_s: float) -> Answer:
    await asyncio.sleep(max(0.0, began + request.wait_s - time.monotonic()))
    answer = Answer(request.number, request.is_killer, request.asked, sent=time.monotonic(), is_unique=request.is_unique)
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    reading = _Reading(body, over)
    try:
        transport, _ = await loop.create_connection(lambda: reading, "127.0.0.1", port)
    except OSError as error:
        answer.over, answer.wrong = time.monotonic(), repr(error)
        return answer
    try:
        await asyncio.wait_for(over, limit_s)
    except TimeoutError:
        answer.wrong = f"no end after {limit_s:.0f} s"
    finally:
        transport.close()
    answer.over, answer.pieces = time.monotonic(), reading.pieces
    read_answer(b"".join(reading.chunks), answer)
    return answer


def read_answer(raw: bytes, answer: Answer) -> None:
    """Fill in the status, the token ids and how it ended, from the bytes of an HTTP answer."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    answer.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    text = (dechunked(rest) if b"chunked" in head.lower() else rest).decode(errors="replace")
    if answer.status != 200:
        answer.wrong = answer.wrong or text[:300] or "no answer"
        is_ours = any(words in text for words in ABORTED)
        is_refused = answer.status in REFUSED
        answer.end = "refused" if is_refused else "aborted" if is_ours and answer.status else "lost"
        return
    is_stream = b"text/event-stream" in head.lower()
    error = _read_events(text, answer) if is_stream else _read_whole(text, answer)
    if error:
        answer.wrong = error[:300]
        answer.end = "aborted" if any(words in error for words in ABORTED) else "lost"
    elif len(answer.ids) != answer.asked:
        answer.wrong = answer.wrong or f"{len(answer.ids)} tokens of {answer.asked}"
    else:
        answer.end = "served"


def _read_events(text: str, answer: Answer) -> str:
    """Collect the ids of a stream; the error in it, or that it broke off."""
    is_done = False
    said: int | None = None
    for line in text.split("\n"):
        if not line.startswith("data: "):
            continue
        if line.startswith("data: [DONE]"):
            is_done = True
            continue
        try:
            event = json.loads(line[6:])
        except ValueError:
            return "the stream broke off in the middle of a piece"
        if "error" in event:
            return json.dumps(event["error"])
        for choice in event.get("choices", ()):
            answer.ids += choice.get("token_ids") or ()
        if event.get("usage"):
            said = int(event["usage"]["completion_tokens"])
    if not is_done:
        return "the stream broke off"
    return f"{len(answer.ids)} tokens came, the usage says {said}" if said is not None and said != len(answer.ids) else ""


def _read_whole(text: str, answer: Answer) -> str:
    try:
        found = json.loads(text)
        answer.ids += found["choices"][0].get("token_ids") or ()
    except (ValueError, LookupError, TypeError):
        return "the answer broke off"
    return ""


def dechunked(data: bytes) -> bytes:
    """The body of an answer in HTTP's chunks; as much of it as came."""
    parts = []
    while data:
        line, _, data = data.partition(b"\r\n")
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            break
        if size == 0:
            break
        parts.append(data[:size])
        data = data[size + 2 :]
    return b"".join(parts)


# What can be read from a round


def summary(began: float, answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts, speed and standstills of one round."""
    ends = {name: sum(a.end == name for a in answers) for name in ("served", "refused", "aborted", "lost")}
    killers = {f"killers_{name}": sum(a.end == name and a.is_killer for a in answers) for name in ends}
    seconds = max((a.over for a in answers), default=began) - began
    tokens = sum(len(a.ids) for a in answers)
    wrong = sorted({f"{a.status}: {a.wrong}" for a in answers if a.end != "served"})
    return {
        "requests": len(answers), **ends, **killers, "seconds": round(seconds, 3), "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1) if seconds > 0 else None,
        "still_s": longest_standstill(answers), "gap_s": longest_gap(answers),
        "distinct_tokens": len({token for a in answers for token in a.ids}), "wrong": [text[:200] for text in wrong[:3]],
    }  # fmt: skip


def longest_standstill(answers: Iterable[Answer]) -> float | None:
    """The longest time in which no stream at all got a piece, between the first piece and the last; None without two."""
    times = sorted(at for answer in answers for at in answer.pieces)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return round(max(gaps), 3) if gaps else None


def longest_gap(answers: Iterable[Answer]) -> float | None:
    """The longest time between two pieces of one stream; None where no stream has two."""
    pairs = (pair for answer in answers for pair in itertools.pairwise(answer.pieces))
    longest = max((later - earlier for earlier, later in pairs), default=None)
    return None if longest is None else round(longest, 3)


def kept_ids(answers: Iterable[Answer]) -> dict[str, list[int]]:
    """The token ids of every request that was served and that other rounds have too, by its number."""
    return {str(answer.number): answer.ids for answer in answers if answer.end == "served" and not answer.is_unique}


def compare_ids(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """How many requests got the tokens of another round, and where the others first differ."""
    both = [number for number in found if number in wanted]
    differences = [first_difference(found[number], wanted[number]) for number in both]
    places = sorted(place for place in differences if place is not None)
    return {"compared": len(both), "equal": len(both) - len(places), "first_differences": places}


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The place of the first token that differs, counted from 0; None where all are equal."""
    if list(found) == list(wanted):
        return None
    pairs = zip(found, wanted, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(found), len(wanted)))
