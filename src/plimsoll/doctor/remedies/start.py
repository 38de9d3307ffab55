"""Failures of the start: why, what fixes it with this server's own figures, and what does not."""

from __future__ import annotations

import math
import re

from plimsoll.doctor.rules.facts import (
    BY_HAND,
    Explanation,
    FailureCase,
    gib,
    more_room,
    request_clause,
    setting,
    unique,
    without_values,
)
from plimsoll.findings import Remedy
from plimsoll.redaction import redact
from plimsoll.units import GIB, format_count
from plimsoll.vllm.failure_texts import TRAINER_FILES
from plimsoll.vllm.versions import Behaviour

_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
FREE_OF_TOTAL = rf"\({_NUMBER}/{_NUMBER} GiB\) on "
_CHECK = rf"{FREE_OF_TOTAL}startup.{{0,80}}\({_NUMBER}, {_NUMBER} GiB\)"
_PROFILED = rf"Initial free memory:? {_NUMBER}( GiB)?.{{0,60}}?current free memory:? {_NUMBER}"


def weights(case: FailureCase) -> Explanation:
    """The weights did not fit on the card."""
    oom = case.oom
    because = "torch ran out of GPU memory while the model's weights were put on the card"
    if oom.total is not None and oom.own is not None:
        because += f": {gib(oom.own)} of {gib(oom.total)} were already taken by this process"
    if case.plan is not None and case.plan.weights_bytes is not None:
        because += f"; plan computes {gib(case.plan.weights_bytes)} of weights a GPU for this command"
    remedy = [
        *case.expandable,
        *case.planned("--tensor-parallel-size", "--pipeline-parallel-size"),
        Remedy("--tensor-parallel-size N", "each GPU then holds 1/N of the weights: N is at least their whole size divided by "
               "the card's; needs that many cards", "--tensor-parallel-size"),
        Remedy("use a quantised checkpoint (FP8, AWQ, GPTQ)", "8-bit weights take half, 4-bit a quarter; test its answers"),
        Remedy("--cpu-offload-gb N", "keeps N GiB of the weights in host memory; much slower", "--cpu-offload-gb"),
    ]  # fmt: skip
    if case.facts.flags.get("enable_lora") == "True":
        remedy.append(setting("--max-loras", 1, "the buffers of adapters are taken with the weights"))
    return Explanation(because, unique(remedy))


def free_memory(case: FailureCase) -> Explanation:
    """Another process held the memory."""
    because, share = _held(case)
    frames = case.symptom.exception.frames if case.symptom.exception is not None else ()
    if any(part in frame.file for frame in frames for part in TRAINER_FILES):
        because += "; a trainer runs in this process, and most of that is its own"
        return Explanation(because, share, "trainer-holds-memory")
    remedy = [
        Remedy("find the holder on the host with nvidia-smi and stop it, if it is yours to stop",
               "after a crash look for VLLM::EngineCore and VLLM::Worker: they can outlive their API server"),
        Remedy("in a restart script, wait until the card's used memory has fallen before starting again",
               "a new server looks at the card within seconds, the old one needs longer to go"),
        *share,
        Remedy("CUDA_VISIBLE_DEVICES=N", "another card"),
    ]  # fmt: skip
    return Explanation(because, remedy)


_WHILE = {
    "weights": " while loading weights", "profile": " in the trial run", "kv-allocation": " while taking the KV cache",
    "graph-capture": " while capturing CUDA graphs", "sampler-warmup": " in the sampler's warm-up",
}  # fmt: skip


def _held(case: FailureCase) -> tuple[str, list[Remedy]]:
    """Who held how much, as far as the log tells, and the share of the card that would have fitted."""
    step = case.symptom.step.name if case.symptom.step is not None else ""
    if (check := re.search(_CHECK, case.line)) is not None:
        free, total, share, wanted = (float(check[group]) for group in range(1, 5))
        if not free < wanted <= total:  # figures that contradict each other are not subtracted
            said = f"{free:.2f} of {total:.2f} GiB free, {wanted:.2f} GiB wanted"
            return f"the GPU's free memory was less than what vLLM wanted; the log's figures contradict each other ({said})", []
        because = (
            f"vLLM wanted {wanted:.2f} GiB ({share:g} x {total:.2f} GiB) free before it began; {free:.2f} GiB were, "
            f"so {wanted - free:.2f} GiB are missing and {total - free:.2f} GiB were held by others "
            "(or by a server that has not gone yet)"
        )
        fits = math.floor(free / total * 100) / 100 if total else 0
        why = f"shares the card on purpose: {free:.2f} of {total:.2f} GiB were free; costs KV cache"
        return because, [setting("--gpu-memory-utilization", f"{fits:.2f}", why)] if 0.1 < fits <= 1 else []
    if case.oom.others:
        because = f"other processes hold {gib(case.oom.others)} of this GPU's {gib(case.oom.total)}"
        listed = ", ".join(f"process {pid} with {gib(size)}" for pid, size in case.oom.neighbours)
        because += f" ({listed})" if listed else "; they are not listed, so they run in another container or as another user"
        return f"{because}; this one had only {gib(case.oom.own)} when it failed{_WHILE.get(step, '')}", []
    if step == "device":
        return "the GPU had no memory left even for this process's first steps on it: others hold it", []
    return "another process held memory on the GPU when this server needed it", []


def profile_run(case: FailureCase) -> Explanation:
    """The trial run before the cache is sized."""
    frames = case.symptom.exception.frames if case.symptom.exception is not None else ()
    words = ("vision", "image", "multimodal", "mm_encoder", "video", "audio", "visual", "_vl")
    tokens = case.max_num_batched_tokens
    multimodal = any(word in (frame.function + frame.file).lower() for frame in frames for word in words)
    because = f"the trial run that measures memory failed: {request_clause(case)}. It runs one full batch"
    because += f" of {format_count(tokens)} tokens" if tokens else " (--max-num-batched-tokens)"
    because += " with the largest images or videos the model takes" if multimodal else ""
    because += ", before any KV cache exists"
    remedy = case.expandable
    if multimodal:
        remedy.append(Remedy("--limit-mm-per-prompt '{\"image\": 1, \"video\": 0}'",
                             "the trial run prepares the largest allowed input", "--limit-mm-per-prompt"))  # fmt: skip
    if tokens is None or tokens > 512:
        smaller = max(512, tokens // 4) if tokens else 2048
        why = "working memory falls in proportion; costs time to first token"
        remedy.append(setting("--max-num-batched-tokens", smaller, why))
    if case.max_num_seqs is None or case.max_num_seqs > 64:
        remedy.append(setting("--max-num-seqs", 64, "fewer rows in the sampler's part of the trial"))
    return Explanation(because, unique([*remedy, *case.planned("--tensor-parallel-size")]))


def profile_neighbour(case: FailureCase) -> Explanation:
    """Memory was released by somebody else while vLLM measured."""
    profiled = re.search(_PROFILED, case.line)
    because = (
        "more memory was free after the trial run than before it: another process let go of memory while vLLM measured, "
        "so its figures mean nothing"
    )
    if profiled is not None and profiled[2]:  # early releases print bytes
        because += f" ({profiled[1]} GiB free before, {profiled[3]} after)"
    remedy = [
        Remedy("start again once the other process is gone or settled", "nothing is wrong with this server's own flags"),
        Remedy("start servers that share a card one after the other", "each measures the card while the other changes it"),
    ]
    if case.has(Behaviour.FIXED_CACHE_SIZE) is not False:
        why = "gives the cache a fixed size and skips the measurement (0.10.2 and later)"
        remedy.append(Remedy("--kv-cache-memory-bytes N", why, "--kv-cache-memory-bytes"))
    return Explanation(because, remedy)


def graph_capture(case: FailureCase) -> Explanation:
    """CUDA graphs did not fit into what was left outside the cache."""
    because = (
        f"CUDA graphs are captured after the KV cache took its share, into what is left outside it: {request_clause(case)}"
    )
    estimated, actual = case.facts.measured.graphs_estimated_bytes, case.facts.measured.graphs_actual_bytes
    if estimated:
        because += f"; vLLM estimated {gib(estimated)} for the graphs"
        is_left = case.has(Behaviour.GRAPH_ESTIMATE) is False
        because += " and did not set it aside (it does by default from 0.20)" if is_left else ""
    elif actual:
        because += f"; they took {gib(actual)}"
    remedy = case.expandable
    needed, cache = max(case.missing or 0, estimated or 0, GIB // 2), case.facts.measured.kv_bytes
    is_enough = not estimated or cache is None or cache > needed or case.number(BY_HAND) is not None
    if is_enough and estimated and case.has(Behaviour.GRAPH_ESTIMATE_ASKED) and not case.has(Behaviour.GRAPH_ESTIMATE):
        why = "sets the estimate aside before the KV cache is sized; costs that much of it"
        remedy.append(Remedy("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1", why))
    if is_enough:
        remedy.append(more_room(case, needed))
    if case.has(Behaviour.GRAPH_SIZE_LIMIT) is not False:
        remedy.append(setting("--max-cudagraph-capture-size", 64, "fewer and smaller graphs; larger batches then run without"))
    if case.max_num_seqs is None or case.max_num_seqs > 64:
        remedy.append(setting("--max-num-seqs", 64, "graphs are captured up to the number of requests at once"))
    remedy.append(Remedy("--enforce-eager", "no graphs at all; costs speed in generation", "--enforce-eager"))
    if case.facts.flags.get("enable_lora") == "True":
        remedy.append(setting("--max-loras", 1, "with LoRA every size is captured twice"))
    if not is_enough:
        has = gib(max(0, cache or 0))
        why = f"the KV cache can give the graphs its {has} and no more, and they were estimated at {gib(estimated)}"
        remedy.append(Remedy("a lower --gpu-memory-utilization, beside one of these", why, "--gpu-memory-utilization"))
    return Explanation(because, unique(remedy))


def sampler_warmup(case: FailureCase) -> Explanation:
    """The sampler's first full batch did not fit."""
    requests = re.search(r"with (\d{1,7}) dummy requests", case.line)
    rows = int(requests[1]) if requests else case.max_num_seqs
    because = (
        f"the last trial, choosing a token for {format_count(rows) if rows else '--max-num-seqs'} requests at once, "
        f"did not fit beside the KV cache: {request_clause(case)}"
    )
    if case.plan is not None and case.plan.vocab_size and rows:
        words = case.plan.vocab_size
        because += f"; {format_count(rows)} x {format_count(words)} words x 4 bytes = {gib(rows * words * 4)}"
    fewer = 256 if rows is None or rows > 256 else max(8, rows // 4)
    fewer_rows = setting("--max-num-seqs", fewer, "memory falls in proportion; costs nothing unless you run more at once")
    return Explanation(because, [fewer_rows, *case.expandable, more_room(case, case.missing or GIB // 2)])


def bad_flag(case: FailureCase) -> Explanation:
    """The parser refused the command line."""
    refused = re.search(r"error: (.{1,300})", redact(case.line))  # what was refused may be the word after --api-key
    said = f": {without_values(''.join(filter(str.isprintable, refused[1])).strip())}" if refused is not None else ""
    return Explanation(f"vLLM's own parser refused the command{said}")
