"""The options of `plimsoll simulate`, `sweep`, `tune` and `standin`: traffic, step times, engine. Without numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_names
from plimsoll.launch.options import Words, decimal, option, switch, whole
from plimsoll.plan.options import ServerOptions
from plimsoll.vllm.versions import releases

ENGINE = "The engine, as vLLM names it (defaults in brackets)"
ROUTERS = ("round-robin", "least-load", "prefix", "gateway")
STEP_FIELDS = ("base_ns", "token_ns", "seq_ns", "ctx_ps")
_step_ns = partial(whole, most=10**13)


def file_named(text: str, name: str) -> str:
    """The name of a file that will be written."""
    if not text or text == "-" or "\0" in text:
        raise BadInput(f"{name} needs the name of a file, not {text!r}")
    return text


def speedup_of(text: str, name: str) -> float:
    """The factor by which requests come faster."""
    speedup = decimal(text, name)
    if not speedup > 0:
        raise BadInput(f"{name} must be above 0, not {text}")
    return speedup


def json_object(text: str, name: str) -> dict[str, Any]:
    """An object as vLLM's own flags take it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadInput(f"{name} is not a JSON object: {text[:60]!r}")
    return found


def share_of_drafts(text: str, name: str) -> float:
    """A share from 0 to 1, or from 0 % to 100 %, as vLLM's log writes it."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadInput(f"{name} must be a share from 0 to 1, or from 0% to 100%, not {text[:40]}")
    return share


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(ServerOptions):
    """The traffic to replay, and the step times."""

    limit: int | None = option("N", "the first N of each trace", read=partial(whole, least=1), heading="What is replayed")
    from_s: float | None = option("S", "only from so many seconds after its start", read=decimal)
    until_s: float | None = option("S", "and until so many", read=decimal)
    speedup: float = option("X", "arrivals X times as fast", read=speedup_of, default=1.0)
    skip_bad: bool = switch("leave out rows that cannot be read")
    trace_block_size: int = option("N", "tokens of one hash id of the trace (512)", read=partial(whole, least=1), default=0)
    rate: float | None = option("X", "requests a second, for a trace of lengths only", read=decimal)
    arrivals: str | None = option("KIND", "poisson, constant, bursty or at-once; for lengths only")
    burstiness: float | None = option("X", "how bursty (0.25)", read=decimal)
    seed: int | None = option("N", "of those arrivals (0)", read=whole)
    fit: str | None = option(
        "FILE", "learn it from a real run with the same options (docs/step-time.md)", heading="How long a step takes"
    )
    fit_series: str | None = option("FILE", "adds what a run with stamps showed every second")
    save_times: str | None = option("FILE", "keeps what --fit learnt", read=file_named)
    times: str | None = option("FILE", "replays other options with what was kept")
    acceptance_rate: float | None = option("X", "share of drafted tokens that are accepted (60%)", read=share_of_drafts)


@dataclass(frozen=True, kw_only=True)
class StepOptions(Words):
    """Step times of the user's own."""

    base_ns: int | None = option("N", "how long a step takes: itself (6000000)", read=_step_ns)
    token_ns: int | None = option("N", "each of its tokens (20000)", read=_step_ns)
    seq_ns: int | None = option("N", "each of its requests (10000)", read=_step_ns)
    ctx_ps: int | None = option("N", "each token of their contexts, in picoseconds (40000)", read=_step_ns)

    @property
    def said(self) -> dict[str, int]:
        """The options that were given, by their field of StepTime."""
        return {name: value for name in STEP_FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(StepOptions, TrafficOptions):
    """The server that replays the traffic; names as vLLM's, defaults in brackets."""

    num_blocks: int | None = option("N", "blocks of KV cache, one of them the null block (8192)", read=whole, heading=ENGINE)
    plan: str | None = option("PLAN.json", "all of this from `plimsoll plan --json`; or --gpu NAME and the command after `--`")
    block_size: int | None = option("N", "tokens of a block (16)", read=whole)
    max_num_seqs: int | None = option("N", "requests at once (256)", read=whole)
    max_num_batched_tokens: int | None = option("N", "tokens of a step (2048)", read=whole)
    max_model_len: int | None = option("N", "tokens of a request (16384)", read=whole)
    long_prefill_token_threshold: int | None = option("N", "tokens of a long prompt in a step (0: no limit)", read=whole)
    watermark: float | None = option("X", "share of the blocks kept free (0)", read=decimal)
    policy: str | None = option("P", "fcfs or priority (fcfs)", name="--scheduling-policy", choices=("fcfs", "priority"))
    no_prefix_caching: bool = switch("no prefix caching")
    no_chunked_prefill: bool = switch("prompts in one piece")
    no_reserve_full_isl: bool = switch("admit a prompt before all of its blocks are free")
    async_scheduling: bool = switch("two steps under way at once (off, or the plan's)")
    no_async_scheduling: bool = switch("one after the other")
    max_num_queued_reqs: int | None = option("N", "requests in the server at once; further ones are refused", read=whole)
    max_num_queued_tokens: int | None = option("N", "prompt tokens without an answer; further requests are refused", read=whole)
    max_loras: int | None = option("N", "LoRA adapters in a step", read=partial(whole, least=1))
    speculative_config: dict[str, Any] | None = option(
        "JSON", 'a drafter: {"method": "eagle3", "num_speculative_tokens": 3}', read=json_object
    )
    groups: str | None = option("full:16,sliding:16:1024,mamba:16", "layers of several kinds that share the blocks")


@dataclass(frozen=True, kw_only=True)
class RoutedOptions(Words):
    """Several engines behind a router."""

    replicas: int | None = option(
        "N", "so many engines behind a router (1, or the command's data-parallel engines)",
        read=partial(whole, least=1, most=1000), heading="Several engines",
    )  # fmt: skip
    router: str = option("R", "round-robin, least-load (the default), prefix or gateway", choices=ROUTERS, default="least-load")


@dataclass(frozen=True, kw_only=True)
class FleetOptions(RoutedOptions, ReplayOptions):
    """Several engines, and traffic that a guard recorded."""

    from_guard: str | None = option("URL", "what the engines of a guard recorded (docs/whatif.md) in place of a trace")
    last_hours: float = option("H", "of it the last H hours (24)", read=decimal, default=24.0)
    token_file: str | None = option("FILE", "guard's token; default: as for guardctl")


_servers = partial(whole, least=1, most=10_000)


def _within(text: str, name: str, most: float, *, above_0: bool) -> float:
    number = decimal(text, name)
    if not 0 <= number <= most or (above_0 and number == 0):
        span = f"above 0 and at most at {most:.0f}" if above_0 else f"between 0 and {most:.0f}"
        raise BadInput(f"{name} must lie {span}, not {text[:40]}")
    return number


_start_seconds, _speed = partial(_within, most=86_400, above_0=False), partial(_within, most=1e6, above_0=True)


@dataclass(frozen=True, kw_only=True)
class StandinCommandOptions(StepOptions, ServerOptions):
    """The options of `plimsoll standin`."""

    gpu: str | None = option("NAME", "the card it pretends to have; default: L4", offers=gpu_names)
    vllm: str | None = option("VERSION", "whose flags, metrics and log lines; default: the newest known", offers=releases)
    host: str | None = option("HOST", "where it listens; default: the command's, or 127.0.0.1")
    port: str | None = option("N", "its port, 0: any that is free; default: the command's, or 8000")
    speed: float = option("X", "how fast its time passes; 10: ten times as fast as real; default: 1", read=_speed, default=1.0)
    start_seconds: float = option("X", "how long the start takes; default: 0", read=_start_seconds, default=0.0)
    fault: tuple[str, ...] = option(
        "KIND[@AT][:FOR][=VALUE]",
        "what goes wrong and when: wedge@60s:30s, oom@5m, ...",
        may_repeat=True,
        default=(),
    )
    fleet: int | None = option("N", "so many servers in this process, on the ports from --port on", read=_servers)
