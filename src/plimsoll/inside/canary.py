"""The test request of one token by which a stuck engine is proven."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from plimsoll.inside.engine_view import CANARY
from plimsoll.inside.faults import FAULTS

SOME_TOKEN = 1


async def canary_fails(client: Any, limit_s: float, params: Any = None) -> bool:
    """True when no token came within the limit; False when one did, or when the test itself could not be made."""
    try:
        if params is None:
            params = importlib.import_module("vllm").SamplingParams(max_tokens=1, temperature=0.0)
        task = asyncio.get_running_loop().create_task(_one_token(client, params))
    except Exception as error:
        FAULTS.note("the test request", error)
        return False
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    finally:
        task.cancel()  # not waited for: with a stuck engine taking the request back may take for ever, too
    if done and not task.cancelled() and (problem := task.exception()) is not None:
        FAULTS.note("the test request", problem)
    return not done


async def _one_token(client: Any, params: Any) -> None:
    request_id = f"{CANARY}{time.monotonic_ns()}"
    # Left early, vLLM takes the request back itself.
    async for _ in client.generate({"prompt_token_ids": [SOME_TOKEN]}, params, request_id):
        return
