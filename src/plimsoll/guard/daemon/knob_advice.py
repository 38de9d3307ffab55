"""Advice on knobs: replays the last minutes of an engine's recording, with a clock fitted to them, against the promise.

The replay runs in a process of its own (knob_replay.py): it takes seconds of a core, and guard's loop must not wait for it.
Guard sets no knob itself: the advice is a remark beside the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.adapters.run_command import run_command
from plimsoll.guard.config import PromiseConfig
from plimsoll.guard.daemon.engine_look import served_model
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.inside.knobs import MAX_SEQS, MAX_TOKENS
from plimsoll.net.address import address
from plimsoll.net.client import HttpClient, Lost

LIMIT_S = 120.0
PAGE_MAX = 16 << 20
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_UNFINISHED = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([\d.e+]+)", re.MULTILINE)


class KnobAdvisor:
    """Advises on every engine with a recording at intervals; `remark` puts the advice beside it, or takes it away."""

    def __init__(
        self, promise: PromiseConfig, engines: Sequence[EngineConfig], remark: Callable[[str, str, str], None]
    ) -> None:
        self._promise, self._remark = promise, remark
        self._engines = [engine for engine in engines if engine.recording is not None and engine.token is not None]

    async def run(self) -> None:
        """Advises on one engine after the other, for ever."""
        while True:
            await asyncio.sleep(self._promise.every_s)
            for engine in self._engines:
                self._remark(engine.name, (await self.advise(engine))[0], "advice")

    async def advise(self, engine: EngineConfig) -> tuple[str, str]:
        """Returns the advice for one engine now, with its command; and why there is none."""
        found = await limits_of(engine)
        if isinstance(found, str):
            return "", found
        asked = {
            "folder": engine.recording, "since": time.time() - self._promise.window_s, **found,
            "promise": [self._promise.ttft_s, self._promise.tpot_s],
        }  # fmt: skip
        words = (sys.executable, "-m", "plimsoll.guard.daemon.knob_replay", json.dumps(asked))
        ran = await run_command(words, LIMIT_S, os.environ, only_stdout=True)
        try:
            told = json.loads(ran.output)
            if told["why_not"]:
                return "", str(told["why_not"])
            command = f"guardctl set {engine.name} {told['knob']}={told['value']} --for 2h"
            return f"{told['sentence']}; {command}", ""
        except (ValueError, KeyError, TypeError) as problem:
            return "", f"the replay failed: {ran.trouble or type(problem).__name__}"


async def limits_of(engine: EngineConfig) -> dict[str, Any] | str:
    """Returns an engine's limits for the simulator, the knobs that can be set and its requests; or why not."""
    assert engine.token is not None
    told = await GateHttpClient(engine.gate_url or engine.url, engine.token).knobs()
    model = await served_model(engine.url, engine.api_key)
    page = await HttpClient(address(engine.url)).call("GET", "/metrics", deadline_s=10.0, most_bytes=PAGE_MAX)
    if not told.is_done or model is None or model.context is None or isinstance(page, Lost):
        return f"the engine's limits are not known: {told.message}"
    if told.facts.get("leased"):
        return "knobs are set: what they give is not known before they are let go"
    knobs = [knob for knob in (MAX_SEQS, MAX_TOKENS) if knob not in str(told.facts["fixed"]).split()]
    if not knobs:
        return "its knobs cannot be turned (why_not under /plimsoll/knobs)"
    text = page.body.decode(errors="replace")
    limits = limits_from(text, str(told.facts["in_force"]), int(model.context))
    unfinished = int(sum(map(float, _UNFINISHED.findall(text))))
    return limits if isinstance(limits, str) else {"limits": limits, "unfinished": unfinished, "knobs": knobs}


def limits_from(page: str, in_force: str, context: int) -> dict[str, Any] | str:
    """Returns the limits by a metrics page, the knobs in force and the longest request; or why they are unknown."""
    values, found = dict(word.split("=") for word in in_force.split()), _CACHE.search(page)
    labels = {} if found is None else dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    try:
        return {
            "num_blocks": int(labels["num_gpu_blocks"]), "block_size": int(labels["block_size"]),
            "max_num_seqs": int(values["max-num-seqs"]), "max_num_batched_tokens": int(values["max-num-batched-tokens"]),
            "max_model_len": context, "prefix_caching": labels.get("enable_prefix_caching") == "True",
            "watermark": float(values["kv-headroom"]),
            "long_prefill_token_threshold": int(values["long-prefill-token-threshold"]),
        }  # fmt: skip
    except (KeyError, ValueError):
        return "the engine's limits are not known: its metrics page does not tell its blocks"
