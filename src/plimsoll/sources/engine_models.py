"""Which model an engine serves and how long a request may be; and one request to warm it up."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from plimsoll.domain.asking import bearer
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.sources.engine_canary import CanaryAsker, CanaryPlan
from plimsoll.sources.engine_http import Client
from plimsoll.sources.http_answer import Missed

MODELS = "/v1/models"
ANSWER_MAX = 4 << 20
DEADLINE_S = 10.0
WARM_S = 120.0  # the first request of a process may compile
LOOK_EVERY_S = 0.1


class Served(NamedTuple):
    """One model."""

    name: str
    context: float | None  # tokens


async def served(url: str, api_key: str | None = None, *, deadline_s: float = DEADLINE_S) -> Served | None:
    """The first model that it lists; None where it does not tell."""
    client = Client(url)
    try:
        reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=ANSWER_MAX)
        if reply.status == 401 and api_key is not None:
            reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=ANSWER_MAX, headers=bearer(api_key))
    except Missed:
        return None
    finally:
        client.close()
    if reply.status != 200:
        return None
    try:
        first = json.loads(reply.body)["data"][0]
        name, context = first["id"], first.get("max_model_len")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    is_number = isinstance(context, int) and not isinstance(context, bool) and 0 < context < 2**53
    return Served(name, float(context) if is_number else None) if isinstance(name, str) and 0 < len(name) < 1000 else None


async def warm(url: str, api_key: str | None = None, *, deadline_s: float = WARM_S) -> Outcome:
    """One request of one token: answered, or not."""
    model = await served(url, api_key)
    if model is None:
        return unsure("which model it serves is not known: no request was sent")
    asker = CanaryAsker(url, CanaryPlan(deadline_s=deadline_s, model=model.name, api_key=api_key))
    try:
        asker.begin(0.0, model.name)
        while asker.is_asking:
            await asyncio.sleep(LOOK_EVERY_S)
        answer = asker.last
    finally:
        await asker.close()
    if answer is not None and answer.status == 500:  # it took the request and broke over it; a refusal has another number
        return failed("the first request failed: the engine answered it with 500")
    if answer is None or answer.is_answered is None:
        return unsure(f"the first request could not be made: {'' if answer is None else answer.why}")
    if not answer.is_answered:
        return failed(f"the first request got no answer in {deadline_s:.0f} s")
    if answer.is_garbage:
        return failed("the first request was answered with what is no text")
    return done(f"the first request was answered in {answer.seconds or 0.0:.1f} s")
