"""Failures while serving: why, what fixes it with this server's own figures, and what does not."""

from __future__ import annotations

import math
import re

from plimsoll.doctor.remedies.start import FREE_OF_TOTAL
from plimsoll.doctor.rules.facts import EXPANDABLE, Case, Explained, asked, gib, more_room, setting
from plimsoll.findings import Remedy
from plimsoll.units import GIB, format_count

_NOT_THE_CACHE = "prefix caching off, or /reset_prefix_cache: the KV cache was taken whole at start and cannot run out this way"
_NOT_BY_HAND = "emptying torch's cache by hand: torch did that itself before it raised the error"
_NOT_HIGHER = "a HIGHER --gpu-memory-utilization: it takes room from exactly what failed"
V0_REQUESTS_AT_ONCE = 256  # the first engine's --max-num-seqs where none was given


def _fragments(case: Case) -> str:
    return ": enough in total, but in pieces too small" if case.oom.is_fragmented else ""


def _room(case: Case) -> Remedy:
    return more_room(case, case.missing if case.missing is not None else GIB)


def _expandable(case: Case) -> list[Remedy]:
    return [EXPANDABLE] if case.oom.is_fragmented else []


def forward(case: Case) -> Explained:
    """Activations of a step did not fit."""
    tokens = case.max_num_batched_tokens
    because = f"a step of the model ran out of GPU memory while serving: {asked(case)}{_fragments(case)}"
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
    nots = [_NOT_THE_CACHE, _NOT_BY_HAND, _NOT_HIGHER]
    return Explained("a step ran out of GPU memory while serving", because, remedy, nots)


def logits(case: Case) -> Explained:
    """Logits, sampling or log-probabilities."""
    raised = case.complaint.raised
    wanted = raised is not None and any("prompt_logprobs" in name for name in raised.functions())
    asked_for = " for a request that wants prompt_logprobs" if wanted else ""
    because = f"turning the model's output into tokens{asked_for} ran out of GPU memory: {asked(case)}{_fragments(case)}"
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
    nots = [
        "more GPUs: the whole vocabulary is gathered on each", _NOT_THE_CACHE, _NOT_BY_HAND,
        "--max-model-len: rows are counted by step, not by request",
    ]  # fmt: skip
    return Explained("logits or sampling ran out of GPU memory", because, remedy, nots)


def _measured(case: Case) -> Remedy:
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override")  # beside a cache of a given size no room is kept
    by_hand = "".join(f" and --{name.replace('_', '-')}" for name in sizes if case.number(name))
    return Remedy(f"leave out --skip-mm-profiling{by_hand}", "the start then tries the largest input and keeps room for it",
                  "--skip-mm-profiling")  # fmt: skip


def multimodal(case: Case) -> Explained:
    """An image, a video or a sound."""
    because = f"the encoder of images, video or sound ran out of GPU memory: {asked(case)}{_fragments(case)}"
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
    nots = ["--max-num-batched-tokens: the encoder works on whole inputs", _NOT_THE_CACHE, _NOT_BY_HAND]
    return Explained("the multimodal encoder ran out of GPU memory", because, remedy, nots)


def lora(case: Case) -> Explained:
    """An adapter."""
    because = f"loading or switching to a LoRA adapter ran out of GPU memory: {asked(case)}{_fragments(case)}"
    remedy = [
        setting("--max-loras", 1, "slots are kept on the GPU"),
        Remedy("--max-lora-rank N", "the rank your adapters really have: slots are sized by it", "--max-lora-rank"),
        _room(case),
    ]
    nots = [_NOT_THE_CACHE, "--max-cpu-loras: that is host memory"]
    return Explained("a LoRA adapter ran out of GPU memory", because, remedy, nots)


def neighbour(case: Case) -> Explained:
    """Somebody else grew on the same card."""
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
    nots = ["--max-num-seqs, --max-model-len: this server uses what it was given", _NOT_THE_CACHE]
    return Explained("another process took GPU memory while this server ran", because, remedy, nots)


def wake_up(case: Case) -> Explained:
    """The memory given up in sleep was gone when it woke."""
    because = f"the server woke from sleep and the memory it had given up was no longer free: {asked(case)}"
    remedy = [
        Remedy("free the card before POST /wake_up",
               "sleep hands the memory to whoever asks first; nothing keeps it for the sleeper"),
        Remedy("lower --gpu-memory-utilization of every server that shares the card",
               "their sum must leave room for one that is awake", "--gpu-memory-utilization"),
        Remedy("restart the server", "a failed wake-up leaves it half asleep"),
    ]  # fmt: skip
    nots = ["waking it again without freeing memory first"]
    return Explained("waking from sleep ran out of GPU memory", because, remedy, nots)


def collectives(case: Case) -> Explained:
    """NCCL's own buffers."""
    because = (
        "NCCL (the library that joins the GPUs) could not get memory for its buffers, "
        f"which lie outside torch and outside vLLM's measurement: {asked(case)}"
    )
    remedy = [
        _room(case),
        Remedy("NCCL_CUMEM_ENABLE=0", "other, often smaller buffers (vLLM sets it by default in most releases)"),
        Remedy(
            "--disable-custom-all-reduce", "drops the extra buffers of vLLM's own all-reduce", "--disable-custom-all-reduce"
        ),
    ]
    nots = [
        "PYTORCH_CUDA_ALLOC_CONF: the memory is not torch's",
        "--max-model-len, --kv-cache-dtype: the cache takes its whole share whatever they say",
    ]
    return Explained("communication between the GPUs ran out of memory", because, remedy, nots)


def fragmentation(case: Case) -> Explained:
    """Torch held enough, in pieces too small: the contributing reason, not the step."""
    oom = case.oom
    because = (
        f"when {gib(oom.tried)} were asked for, torch held {gib(oom.reserved_unallocated)} that nobody used, "
        "in pieces smaller than that; they lie between live blocks, so torch could not give them back either"
    )
    remedy = [EXPANDABLE]
    if case.since("0.21.0") is False:
        remedy.append(Remedy("vLLM 0.21.0 or later", "limits how weights are cut up while they are prepared"))
    nots = [
        "emptying torch's cache: only whole free segments can go back",
        "a daily restart: it hides the cause",
        _NOT_THE_CACHE,
    ]
    return Explained("torch's memory was in pieces", because, remedy, nots)


def host(case: Case) -> Explained:
    """The host's memory, not the GPU's."""
    name = case.complaint.text.name if case.complaint.text is not None else ""
    if name.startswith("shm"):
        return _shared_memory()
    if name in ("cpu-memory-check", "cpu-cache-check"):
        return _cpu_backend(case)
    if name == "swap-too-large":
        why = "it is pinned host memory for every GPU (and has no use since V1)"
        because = "the CPU swap space asked for is larger than the host's memory allows"
        remedy = [setting("--swap-space", 0, why)]
        return Explained("the swap space does not fit the host's memory", because, remedy, ["any GPU memory setting"])
    raised = case.complaint.raised
    because = "the machine's own memory ran out, not the GPU's"
    if name.startswith("ray"):
        because = "Ray's memory monitor killed a worker because the host's memory ran low"
    elif name == "host-alloc" or (raised is not None and "pin_memory" in raised.functions()):
        because = "page-locked (pinned) host memory could not be taken; the driver calls that out of memory too"
    remedy = [
        Remedy("give the container or the host more memory",
               "loading needs about the size of one shard a worker, offloading what it is told"),
        Remedy("less --cpu-offload-gb, --kv-offloading-size, --swap-space, --mm-processor-cache-gb",
               "each is host memory, some of it a process"),
        Remedy("MAX_JOBS=1 while kernels are compiled", "compilers take several GB each"),
    ]  # fmt: skip
    return Explained("the host ran out of memory", because, remedy, ["--gpu-memory-utilization and every other GPU setting"])


def _cpu_backend(case: Case) -> Explained:
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
    return Explained(
        "the host's memory is less than vLLM was told to take", because, remedy, ["any setting of a GPU: none is used"]
    )


def _shared_memory() -> Explained:
    because = "the shared memory of the container (/dev/shm) is too small for what the processes pass to each other"
    remedy = [
        Remedy("docker run --shm-size 16g, or --ipc=host", "docker gives 64 MiB"),
        Remedy("Kubernetes: mount an emptyDir with medium: Memory at /dev/shm", "the default is 64 MiB there too"),
    ]
    nots = ["any GPU memory setting", "NCCL settings, except NCCL_SHM_DISABLE=1, which costs speed"]
    return Explained("the container's shared memory is too small", because, remedy, nots)


def preemption(case: Case) -> Explained:
    """The first engine gave up for want of swap space."""
    because = "KV blocks ran out, running requests had to be put aside, and there was no CPU swap space left to keep them"
    fewer = max(8, (case.max_num_seqs or V0_REQUESTS_AT_ONCE) // 2)
    remedy = [
        setting("--max-num-seqs", fewer, "half as many: fewer requests at once are faster than requests done twice"),
        Remedy("a current vLLM", "V1 recomputes instead of swapping and cannot fail like this"),
    ]
    return Explained("preemption ran out of swap space", because, remedy, ["a larger --swap-space: it only puts the end off"])
