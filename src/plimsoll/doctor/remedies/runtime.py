"""Failures while serving: why, what fixes it with this server's own figures, and what does not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from plimsoll.doctor.rules.facts import (
    EXPANDABLE,
    FREE_OF_TOTAL,
    Explanation,
    FailureCase,
    gib,
    more_room,
    request_clause,
    setting,
)
from plimsoll.findings import Remedy
from plimsoll.units import GIB, format_count
from plimsoll.vllm.versions import Behaviour

V0_REQUESTS_AT_ONCE = 256  # the first engine's --max-num-seqs where none was given


def _room(case: FailureCase) -> Remedy:
    return more_room(case, case.missing if case.missing is not None else GIB)


def _request(case: FailureCase) -> str:
    return request_clause(case) + (": enough in total, but in pieces too small" if case.oom.is_fragmented else "")


def forward(case: FailureCase) -> Explanation:
    """Activations of a step did not fit."""
    tokens = case.max_num_batched_tokens
    because = f"a step of the model ran out of GPU memory while serving: {_request(case)}"
    if (running := case.facts.scheduler.get("num_running_reqs")) is not None:
        because += f"; {running:.0f} requests were running" if running != 1 else "; one request was running"
    because += (
        ". KV blocks running out never does this (vLLM preempts instead): "
        "the peak of a step went past what the start had measured"
    )
    remedy = [*case.expandable, _room(case)]
    if tokens is None or tokens > 2048:
        smaller = max(2048, (tokens or 8192) // 2)
        remedy.append(setting("--max-num-batched-tokens", smaller, "smaller steps; costs time to first token on long prompts"))
    return Explanation(because, remedy)


def logits(case: FailureCase) -> Explanation:
    """Logits, sampling or log-probabilities."""
    exception = case.symptom.exception
    wanted = exception is not None and any("prompt_logprobs" in name for name in exception.functions())
    asked_for = " for a request that wants prompt_logprobs" if wanted else ""
    because = f"turning the model's output into tokens{asked_for} ran out of GPU memory: {_request(case)}"
    if case.plan is not None and case.plan.vocab_size and case.oom.tried:
        rows = case.oom.tried / (case.plan.vocab_size * 4)
        because += f"; that is {rows:,.0f} rows of {format_count(case.plan.vocab_size)} words at 4 bytes"
    requests = case.max_num_seqs
    fewer = 256 if requests is None or requests > 256 else max(8, requests // 2)
    remedy = [
        Remedy("no prompt_logprobs, and no echo with logprobs, on this server",
               "they need a row of the whole vocabulary for every prompt token"),
        setting("--max-num-seqs", fewer, "fewer rows at once"),
        *case.expandable,
        _room(case),
    ]  # fmt: skip
    return Explanation(because, remedy)


def multimodal(case: FailureCase) -> Explanation:
    """The encoder of images, video or sound."""
    because, remedy = f"the encoder of images, video or sound ran out of GPU memory: {_request(case)}", []
    if case.facts.flags.get("skip_mm_profiling") == "True":
        because += "; with --skip-mm-profiling the start left no room for it"
        sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override")  # beside a cache of a given size no room is kept
        by_hand = "".join(f" and --{name.replace('_', '-')}" for name in sizes if case.number(name))
        why = "the start then tries the largest input and keeps room for it"
        remedy.append(Remedy(f"leave out --skip-mm-profiling{by_hand}", why, "--skip-mm-profiling"))
    remedy += [
        Remedy("--limit-mm-per-prompt '{\"image\": 1}'", "fewer inputs a request", "--limit-mm-per-prompt"),
        Remedy("--mm-processor-kwargs '{\"max_pixels\": 1003520}'", "smaller images, where the model's processor takes it",
               "--mm-processor-kwargs"),
        *case.expandable,
        _room(case),
    ]  # fmt: skip
    return Explanation(because, remedy)


def lora(case: FailureCase) -> Explanation:
    """An adapter and the slot it is kept in."""
    remedy = [
        setting("--max-loras", 1, "slots are kept on the GPU"),
        Remedy("--max-lora-rank N", "the rank your adapters really have: slots are sized by it", "--max-lora-rank"),
        _room(case),
    ]
    return Explanation(f"loading or switching to a LoRA adapter ran out of GPU memory: {_request(case)}", remedy)


def neighbour(case: FailureCase) -> Explanation:
    """Another process grew on the same card."""
    oom = case.oom
    listed = ", ".join(f"process {pid} with {gib(size)}" for pid, size in oom.neighbours)
    because = f"other processes hold {gib(oom.others) if oom.others else 'memory'} of this GPU's {gib(oom.total)}"
    because += f" ({listed})" if listed else ""
    because += f", so this server, which holds {gib(oom.own)}, could not get another {gib(oom.tried)}"
    remedy = [
        Remedy("move the other process to another GPU, or bound its memory",
               "vLLM keeps no reserve for neighbours: it never gives memory back while it runs"),
        _room(case),
    ]  # fmt: skip
    return Explanation(because, remedy)


def wake_up(case: FailureCase) -> Explanation:
    """The memory given up in sleep was gone when it woke."""
    return Explanation(f"the server woke from sleep and the memory it had given up was no longer free: {request_clause(case)}")


def collectives(case: FailureCase) -> Explanation:
    """NCCL's own buffers."""
    because = (
        "NCCL (the library that joins the GPUs) could not get memory for its buffers, "
        f"which lie outside torch and outside vLLM's measurement: {request_clause(case)}"
    )
    return Explanation(because, [_room(case)])


def fragmentation(case: FailureCase) -> Explanation:
    """Torch held enough, in pieces too small: the contributing reason, not the step."""
    oom = case.oom
    because = (
        f"when {gib(oom.tried)} were asked for, torch held {gib(oom.reserved_unallocated)} that nobody used, "
        "in pieces smaller than that; they lie between live blocks, so torch could not give them back either"
    )
    remedy = [EXPANDABLE if case.parallel == 1 else _room(case)]
    if case.has(Behaviour.WHOLE_SEGMENTS) is False:
        remedy.append(Remedy("vLLM 0.21.0 or later", "limits how weights are cut up while they are prepared"))
    return Explanation(because, remedy)


def host(case: FailureCase) -> Explanation:
    """The host's memory, not the GPU's."""
    name = case.symptom.text.name if case.symptom.text is not None else ""
    if name.startswith("shm"):
        because = "the shared memory of the container (/dev/shm) is too small for what the processes pass to each other"
        return Explanation(because, row="shared-memory")
    if name in ("cpu-memory-check", "cpu-cache-check"):  # without a GPU the flag of its memory shares out the host's
        because = "vLLM runs on the CPU here, and the host has less memory free than it was told to take"
        flag, why = "--gpu-memory-utilization", "on the CPU it is the share of the host's memory"
        lower = Remedy(f"a lower {flag}", why, flag)
        if (check := re.search(FREE_OF_TOTAL, case.line)) is not None and (total := float(check[2])):
            free = float(check[1])
            because += f": {free:.2f} of {total:.2f} GiB were free"
            share = math.floor(free / total * 100) / 100
            lower = setting(flag, f"{share:.2f}", why) if 0.05 < share <= 1 else lower
        return Explanation(because, [lower], "cpu-backend")
    if name == "swap-too-large":
        return Explanation("the CPU swap space asked for is larger than the host's memory allows", row=name)
    exception = case.symptom.exception
    if name.startswith("ray"):
        return Explanation("Ray's memory monitor killed a worker because the host's memory ran low")
    if name == "host-alloc" or (exception is not None and "pin_memory" in exception.functions()):
        return Explanation("page-locked (pinned) host memory could not be taken; the driver calls that out of memory too")
    return Explanation("the machine's own memory ran out, not the GPU's")


def preemption(case: FailureCase) -> Explanation:
    """The first engine gave up for want of swap space."""
    because = "KV blocks ran out, running requests had to be put aside, and there was no CPU swap space left to keep them"
    fewer = max(8, (case.max_num_seqs or V0_REQUESTS_AT_ONCE) // 2)
    why = "half as many: fewer requests at once are faster than recomputed ones"
    return Explanation(because, [setting("--max-num-seqs", fewer, why)])


_UTILIZATION_MAX = 0.95


def cache_tokens(cache: Mapping[str, str]) -> int | None:
    """How many tokens the KV cache holds, by the labels of vllm:cache_config_info; None if they do not say."""
    tokens = _whole(cache.get("kv_cache_size_tokens"))
    if tokens is not None:
        return tokens
    # Right for models without hybrid layers, and older releases have nothing better.
    blocks, size = _whole(cache.get("num_gpu_blocks")), _whole(cache.get("block_size"))
    return blocks * size if blocks is not None and size is not None else None


def kv_remedies(cache: Mapping[str, str], figures: Mapping[str, float]) -> tuple[Remedy, ...]:
    """For a cache that is full; `running` 0 says that what runs now is no measure, as after preemptions."""
    found: list[Remedy] = []
    utilization = _number(cache.get("gpu_memory_utilization"))
    if "kv_cache_memory_bytes" in cache:
        do = "give the KV cache more memory than --kv-cache-memory-bytes allows it"
        why = f"it is fixed at {cache['kv_cache_memory_bytes']} bytes, whatever the card has free"
        found.append(Remedy(do, why, "--kv-cache-memory-bytes"))
    elif utilization is None or utilization < _UTILIZATION_MAX:
        do, why = "let vLLM use more of the card, if nothing else needs it", "all of what is added becomes KV cache"
        found.append(Remedy(do, why, "--gpu-memory-utilization", f"{_UTILIZATION_MAX}"))
    if "fp8" not in cache.get("cache_dtype", "") and "int8" not in cache.get("cache_dtype", ""):
        found.append(Remedy("store the cache in 8 bits", "about twice the tokens fit", "--kv-cache-dtype", "fp8"))
    tokens, length = cache_tokens(cache), figures.get("prompt_length_mean", 0.0) + figures.get("output_length_mean", 0.0)
    is_known = tokens is not None and {"prompt_length_mean", "output_length_mean"} <= figures.keys() and length >= 1
    fits = max(1, math.floor((tokens or 0) / length)) if is_known else None
    running = figures.get("running", 0.0)
    if fits is not None and (running < 1 or fits < running):
        why = f"about {fits} requests of the mean length seen fit at once; more are admitted only to be preempted"
        found.append(Remedy("admit no more requests than fit at their full length", why, "--max-num-seqs", str(fits)))
    else:
        why = "those that are admitted then keep their blocks to the end"
        found.append(Remedy("admit fewer requests at once", why, "--max-num-seqs"))
    found.append(Remedy("add a replica, or spread the model over more GPUs", "each brings KV cache of its own"))
    return tuple(found)


KV_NOT_REMEDIES = (
    "/reset_prefix_cache: cached blocks that nobody uses already count as free",
    "a higher --max-num-seqs: more requests would share the same blocks",
    "--swap-space: the second engine (V1) does not swap",
)


def saturated_remedies(running: float, usage: float) -> tuple[Remedy, ...]:
    """For a queue with room in the KV cache."""
    fits = math.floor(running * 0.9 / usage) if usage > 0.05 else 0
    do = "raise --max-num-seqs if as many run as it allows"
    why = f"{running:.0f} run and fill {usage:.0%} of the cache; helps only while the GPU has time left"
    return (
        Remedy(do, why, "--max-num-seqs", str(fits) if fits > running else None),
        Remedy("add a replica, or turn requests away earlier", "a queue that grows never ends by itself"),
    )


def wedge_remedies() -> tuple[Remedy, ...]:
    """For an engine that makes no step."""
    return (
        Remedy("save the stacks of its processes first (py-spy dump), then restart the server", "a stuck step never returns"),
        Remedy("restart on any exit, also on exit code 0", "vLLM exits with 0 when its engine dies"),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 and int(text) > 0 else None
