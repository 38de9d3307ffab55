"""Small engines for tests, with every part chosen by hand."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.standin.engine import StandinConfig, StandinEngine
from plimsoll.standin.faults import Fault, parse_fault
from plimsoll.standin.memory import MemorySizes
from plimsoll.standin.request import EngineRequest, RequestSpec

MIB, GIB = 1 << 20, 1 << 30
NS = 10**9
EDGES = {
    "ttft": (0.01, 0.1, 1.0, 10.0), "inter_token": (0.001, 0.01, 0.1), "e2e": (0.1, 1.0, 10.0),
    "step_tokens": (1.0, 8.0, 64.0, 512.0),
    "prompt": (10.0, 100.0), "output": (10.0, 100.0),
}  # fmt: skip
SIZES = MemorySizes(
    total=24 * GIB, context=600 * MIB, neighbours=0, requested=20 * GIB, weights=15 * GIB, non_torch=100 * MIB,
    activation_peak=900 * MIB, graphs=500 * MIB, kv_cache=3 * GIB, max_num_batched_tokens=2048, max_num_seqs=64, vocab=128_256,
)  # fmt: skip
SETTINGS = EngineLimits(num_blocks=256, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048)


def config(settings: EngineLimits = SETTINGS, step_time: StepTime | None = None, sizes: MemorySizes = SIZES) -> StandinConfig:
    """A small engine; by default 10 ms a step and a pool of 4,080 tokens."""
    return StandinConfig(
        release="0.32.0", model="m", served_names=("m",), max_model_len=settings.max_model_len, settings=settings,
        step_time=step_time or StepTime(10_000_000, 0, 0, 0), sizes=sizes, edges=EDGES, cache_labels={},
    )  # fmt: skip


def engine(*faults: str | Fault, **changes: object) -> StandinEngine:
    """One with these faults, written as --fault has them."""
    made = [parse_fault(one) if isinstance(one, str) else one for one in faults]
    return StandinEngine(config(**changes), made)  # type: ignore[arg-type]


def ask(prompt: int = 100, output: int = 10, seed: int = 1) -> RequestSpec:
    return RequestSpec(np.arange(seed * 10_000, seed * 10_000 + prompt, dtype=np.int64), output, seed=seed)


def served(one: StandinEngine, request: EngineRequest, limit_s: float = 60.0) -> EngineRequest:
    end = one.now_ns + int(limit_s * NS)
    while request.finish is None and one.now_ns < end:
        one.advance(one.now_ns + NS // 20)
    return request
