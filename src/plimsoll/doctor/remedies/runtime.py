"""Failures while serving: why, what fixes it with this server's own figures, and what does not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from plimsoll.doctor.remedies.start import FREE_OF_TOTAL
from plimsoll.doctor.rules.facts import EXPANDABLE, Explanation, FailureCase, gib, more_room, request_clause, setting
from plimsoll.findings import Remedy
from plimsoll.units import GIB, format_count
from plimsoll.vllm.versions import Behaviour

_NOT_THE_CACHE = "prefix caching off, or /reset_prefix_cache: the KV cache was taken whole at start and cannot run out this way"
_NOT_BY_HAND = "emptying torch's cache by hand: torch did that itself before it raised the error"
_NOT_HIGHER = "a HIGHER --gpu-memory-utilization: it takes room from exactly what failed"
V0_REQUESTS_AT_ONCE = 256  # the first engine's --max-num-seqs where none was given


def _fragments(case: FailureCase) -> str:
    return ": enough in total, but in pieces too small" if case.oom.is_fragmented else ""


def _room(case: FailureCase) -> Remedy:
    return more_room(case, case.missing if case.missing is not None else GIB)


def _expandable(case: FailureCase) -> list[Remedy]:
    return [EXPANDABLE] if case.oom.is_fragmented else []


def forward(case: FailureCase) -> Explanation:
    """Activations of a step did not fit."""
    tokens = case.max_num_batched_tokens
    because = f"a step of the model ran out of GPU memory while serving: {request_clause(case)}{_fragments(case)}"
    if (running := case.facts.scheduler.get("num_running_reqs")) is not None:
        because += f"; {running:.0f} requests were running" if running != 1 else "; one request was running"
    because += (
        ". KV blocks running out never does this (vLLM preempts instead): "
        "the peak of a step went past what the start had measured"
    )
    remedy = [*_expandable(case), _room(case)]
    if tokens is None or tokens > 2048:
        smaller = max(2048, (tokens or 8192) // 2)
        why = "smaller steps; costs time to first token on long prompts"
        remedy.append(setting("--max-num-batched-tokens", smaller, why))
    not_remedies = [_NOT_THE_CACHE, _NOT_BY_HAND, _NOT_HIGHER]
    return Explanation("a step ran out of GPU memory while serving", because, remedy, not_remedies)


def logits(case: FailureCase) -> Explanation:
    """Logits, sampling or log-probabilities."""
    exception = case.symptom.exception
    wanted = exception is not None and any("prompt_logprobs" in name for name in exception.functions())
    asked_for = " for a request that wants prompt_logprobs" if wanted else ""
    because = (
        f"turning the model's output into tokens{asked_for} ran out of GPU memory: {request_clause(case)}{_fragments(case)}"
    )
    if case.plan is not None and case.plan.vocab_size and case.oom.tried:
        rows = case.oom.tried / (case.plan.vocab_size * 4)
        because += f"; that is {rows:,.0f} rows of {format_count(case.plan.vocab_size)} words at 4 bytes"
    requests = case.max_num_seqs
    fewer = 256 if requests is None or requests > 256 else max(8, requests // 2)
    remedy = [
        Remedy("no prompt_logprobs, and no echo with logprobs, on this server",
               "they need a row of the whole vocabulary for every prompt token"),
        setting("--max-num-seqs", fewer, "fewer rows at once"),
        *_expandable(case),
        _room(case),
        setting("--max-num-batched-tokens", 2048, "shorter pieces of prompt where prompt_logprobs must stay"),
    ]  # fmt: skip
    not_remedies = [
        "more GPUs: the whole vocabulary is gathered on each", _NOT_THE_CACHE, _NOT_BY_HAND,
        "--max-model-len: rows are counted by step, not by request",
    ]  # fmt: skip
    return Explanation("logits or sampling ran out of GPU memory", because, remedy, not_remedies)


def _measured(case: FailureCase) -> Remedy:
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override")  # beside a cache of a given size no room is kept
    by_hand = "".join(f" and --{name.replace('_', '-')}" for name in sizes if case.number(name))
    return Remedy(f"leave out --skip-mm-profiling{by_hand}", "the start then tries the largest input and keeps room for it",
                  "--skip-mm-profiling")  # fmt: skip


def multimodal(case: FailureCase) -> Explanation:
    because = f"the encoder of images, video or sound ran out of GPU memory: {request_clause(case)}{_fragments(case)}"
    is_unmeasured = case.facts.flags.get("skip_mm_profiling") == "True"
    if is_unmeasured:
        because += "; with --skip-mm-profiling the start left no room for it"
    remedy = [
        *([_measured(case)] if is_unmeasured else []),
        Remedy("--limit-mm-per-prompt '{\"image\": 1}'", "fewer inputs a request", "--limit-mm-per-prompt"),
        Remedy("--mm-processor-kwargs '{\"max_pixels\": 1003520}'", "smaller images, where the model's processor takes it",
               "--mm-processor-kwargs"),
        *_expandable(case),
        _room(case),
    ]  # fmt: skip
    not_remedies = ["--max-num-batched-tokens: the encoder works on whole inputs", _NOT_THE_CACHE, _NOT_BY_HAND]
    return Explanation("the multimodal encoder ran out of GPU memory", because, remedy, not_remedies)


def lora(case: FailureCase) -> Explanation:
    because = f"loading or switching to a LoRA adapter ran out of GPU memory: {request_clause(case)}{_fragments(case)}"
    remedy = [
        setting("--max-loras", 1, "slots are kept on the GPU"),
        Remedy("--max-lora-rank N", "the rank your adapters really have: slots are sized by it", "--max-lora-rank"),
        _room(case),
    ]
    not_remedies = [_NOT_THE_CACHE, "--max-cpu-loras: that is host memory"]
    return Explanation("a LoRA adapter ran out of GPU memory", because, remedy, not_remedies)


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
    not_remedies = ["--max-num-seqs, --max-model-len: this server uses what it was given", _NOT_THE_CACHE]
    return Explanation("another process took GPU memory while this server ran", because, remedy, not_remedies)


def wake_up(case: FailureCase) -> Explanation:
    """The memory given up in sleep was gone when it woke."""
    because = f"the server woke from sleep and the memory it had given up was no longer free: {request_clause(case)}"
    remedy = [
        Remedy("free the card before POST /wake_up",
               "sleep hands the memory to whoever asks first; nothing keeps it for the sleeper"),
        Remedy("lower --gpu-memory-utilization of every server that shares the card",
               "their sum must leave room for one that is awake", "--gpu-memory-utilization"),
        Remedy("restart the server", "a failed wake-up leaves it half asleep"),
    ]  # fmt: skip
    not_remedies = ["waking it again without freeing memory first"]
    return Explanation("waking from sleep ran out of GPU memory", because, remedy, not_remedies)


def collectives(case: FailureCase) -> Explanation:
    """NCCL's own buffers."""
    because = (
        "NCCL (the library that joins the GPUs) could not get memory for its buffers, "
        f"which lie outside torch and outside vLLM's measurement: {request_clause(case)}"
    )
    remedy = [
        _room(case),
        Remedy("NCCL_CUMEM_ENABLE=0", "other, often smaller buffers (vLLM sets it by default in most releases)"),
        Remedy(
            "--disable-custom-all-reduce", "drops the extra buffers of vLLM's own all-reduce", "--disable-custom-all-reduce"
        ),
    ]
    not_remedies = [
        "PYTORCH_CUDA_ALLOC_CONF: the memory is not torch's",
        "--max-model-len, --kv-cache-dtype: the cache takes its whole share whatever they say",
    ]
    return Explanation("communication between the GPUs ran out of memory", because, remedy, not_remedies)


def fragmentation(case: FailureCase) -> Explanation:
    """Torch held enough, in pieces too small: the contributing reason, not the step."""
    oom = case.oom
    because = (
        f"when {gib(oom.tried)} were asked for, torch held {gib(oom.reserved_unallocated)} that nobody used, "
        "in pieces smaller than that; they lie between live blocks, so torch could not give them back either"
    )
    remedy = [EXPANDABLE]
    if case.has(Behaviour.WHOLE_SEGMENTS) is False:
        remedy.append(Remedy("vLLM 0.21.0 or later", "limits how weights are cut up while they are prepared"))
    not_remedies = [
        "emptying torch's cache: only whole free segments can go back",
        "a daily restart: it hides the cause",
        _NOT_THE_CACHE,
    ]
    return Explanation("torch's memory was in pieces", because, remedy, not_remedies)


def host(case: FailureCase) -> Explanation:
    """The host's memory, not the GPU's."""
    name = case.symptom.text.name if case.symptom.text is not None else ""
    if name.startswith("shm"):
        because = "the shared memory of the container (/dev/shm) is too small for what the processes pass to each other"
        remedy = [
            Remedy("docker run --shm-size 16g, or --ipc=host", "docker gives 64 MiB"),
            Remedy("Kubernetes: mount an emptyDir with medium: Memory at /dev/shm", "the default is 64 MiB there too"),
        ]
        not_remedies = ["any GPU memory setting", "NCCL settings, except NCCL_SHM_DISABLE=1, which costs speed"]
        return Explanation("the container's shared memory is too small", because, remedy, not_remedies)
    if name in ("cpu-memory-check", "cpu-cache-check"):
        return _cpu_backend(case)
    if name == "swap-too-large":
        why = "it is pinned host memory for every GPU (and has no use since V1)"
        because = "the CPU swap space asked for is larger than the host's memory allows"
        remedy = [setting("--swap-space", 0, why)]
        return Explanation("the swap space does not fit the host's memory", because, remedy, ["any GPU memory setting"])
    exception = case.symptom.exception
    because = "the machine's own memory ran out, not the GPU's"
    if name.startswith("ray"):
        because = "Ray's memory monitor killed a worker because the host's memory ran low"
    elif name == "host-alloc" or (exception is not None and "pin_memory" in exception.functions()):
        because = "page-locked (pinned) host memory could not be taken; the driver calls that out of memory too"
    remedy = [
        Remedy("give the container or the host more memory",
               "loading needs about the size of one shard a worker, offloading what it is told"),
        Remedy("less --cpu-offload-gb, --kv-offloading-size, --swap-space, --mm-processor-cache-gb",
               "each is host memory, some of it a process"),
        Remedy("MAX_JOBS=1 while kernels are compiled", "compilers take several GB each"),
    ]  # fmt: skip
    return Explanation("the host ran out of memory", because, remedy, ["--gpu-memory-utilization and every other GPU setting"])


def _cpu_backend(case: FailureCase) -> Explanation:
    """Without a GPU the flag of the GPU's memory shares out the host's."""
    because = "vLLM runs on the CPU here, and the host has less memory free than it was told to take"
    lower = Remedy(
        "a lower --gpu-memory-utilization", "on the CPU it is the share of the host's memory", "--gpu-memory-utilization"
    )
    if (check := re.search(FREE_OF_TOTAL, case.line)) is not None and (total := float(check[2])):
        free = float(check[1])
        because += f": {free:.2f} of {total:.2f} GiB were free"
        share = math.floor(free / total * 100) / 100
        if 0.05 < share <= 1:
            lower = setting("--gpu-memory-utilization", f"{share:.2f}", "on the CPU it is the share of the host's memory")
    remedy = [
        lower,
        Remedy("VLLM_CPU_KVCACHE_SPACE=N", "gives the KV cache N GiB instead of a share"),
        Remedy("stop what else uses the host's memory, or give the container more", "the check looks at what is free"),
    ]
    return Explanation(
        "the host's memory is less than vLLM was told to take", because, remedy, ["any setting of a GPU: none is used"]
    )


def preemption(case: FailureCase) -> Explanation:
    """The first engine gave up for want of swap space."""
    because = "KV blocks ran out, running requests had to be put aside, and there was no CPU swap space left to keep them"
    fewer = max(8, (case.max_num_seqs or V0_REQUESTS_AT_ONCE) // 2)
    remedy = [
        setting("--max-num-seqs", fewer, "half as many: fewer requests at once are faster than recomputed ones"),
        Remedy("a current vLLM", "V1 recomputes instead of swapping and cannot fail like this"),
    ]
    return Explanation("preemption ran out of swap space", because, remedy, ["a larger --swap-space: it only puts the end off"])


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
        found.append(
            Remedy(
                "give the KV cache more memory than --kv-cache-memory-bytes allows it",
                f"it is fixed at {cache['kv_cache_memory_bytes']} bytes, whatever the card has free",
                "--kv-cache-memory-bytes",
            )
        )
    elif utilization is None or utilization < _UTILIZATION_MAX:
        found.append(
            Remedy(
                "let vLLM use more of the card, if nothing else needs it", "all of what is added becomes KV cache",
                "--gpu-memory-utilization", f"{_UTILIZATION_MAX}",
            ),
        )  # fmt: skip
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
        found.append(
            Remedy(
                "admit fewer requests at once", "those that are admitted then keep their blocks to the end", "--max-num-seqs",
            ),
        )  # fmt: skip
    found.append(Remedy("add a replica, or spread the model over more GPUs", "each brings KV cache of its own"))
    return tuple(found)


KV_NOT_REMEDIES = (
    "/reset_prefix_cache: cached blocks that nobody uses already count as free",
    "a higher --max-num-seqs: more requests would share the same blocks",
    "--swap-space: the second engine (V1) does not swap",
)


def saturated_remedies(running: float, usage: float) -> tuple[Remedy, ...]:
    """For a queue with room in the KV cache."""
    fits = math.floor(running * 0.9 / usage) if usage > 0.05 else None
    why = f"{running:.0f} run and fill {usage:.0%} of the cache; helps only while the GPU has time left"
    return (
        Remedy(
            "raise --max-num-seqs if as many run as it allows", why, "--max-num-seqs",
            str(fits) if fits is not None and fits > running else None,
        ),
        Remedy("add a replica, or turn requests away earlier", "a queue that grows never ends by itself"),
    )  # fmt: skip


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
