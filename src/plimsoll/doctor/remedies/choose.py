"""Explains a root cause, by its code: title, reason and remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plimsoll.doctor.rules.facts import (
    BY_HAND,
    EXPANDABLE,
    FREE_OF_TOTAL,
    POSITIVE,
    Explanation,
    FailureCase,
    gib,
    lower_utilization,
    more_room,
    request_clause,
    setting,
    smaller_cache,
    unique,
    without_values,
)
from plimsoll.doctor.rules.timeline import LoggedException, ServerProgress
from plimsoll.doctor.words import remedies, words
from plimsoll.findings import Code, Remedy
from plimsoll.redaction import printable, redact
from plimsoll.units import GIB, MIB, format_count
from plimsoll.vllm.failure_texts import TRAINER_FILES
from plimsoll.vllm.versions import Behaviour

_NO_MODULE = r"No module named '([\w.]{1,80})'"


def explain(case: FailureCase) -> Explanation:
    """The reason and the computed remedies, by the code; words from the table for the codes that nothing is computed for."""
    return EXPLAIN.get(case.symptom.code, other)(case)


def offers(case: FailureCase, why: Explanation, row: Mapping[str, Any]) -> list[Remedy]:
    """The remedies in the order of the table, where `use` stands for computed ones; by default these come first."""
    table = row.get("remedy", ()) if why.table is None else why.table
    computed = {"figures": why.remedy, "room": [_room(case)], "expandable": case.expandable}
    if not any(one.get("use") == "figures" for one in table):
        table = [{"use": "figures"}, *table]
    return [offer for one in table for offer in (computed[one["use"]] if "use" in one else remedies([one]))]


def _room(case: FailureCase) -> Remedy:
    return more_room(case, case.missing if case.missing is not None else GIB)


def request_in_pieces(case: FailureCase) -> str:
    """What was asked for and what was free, and whether that was in pieces."""
    return request_clause(case) + (": enough in total, but in pieces too small" if case.oom.is_fragmented else "")


def other(case: FailureCase) -> Explanation:
    """Words for the codes that no computed explanation covers; the text that gave them away is the evidence."""
    code, text, exception = case.symptom.code, case.symptom.text, case.symptom.exception
    rows = words("causes")
    row = rows["codes"].get(str(code), {})
    name = str(code) if "because" in row else str(Code.OTHER_ENGINE_ERROR)
    row = rows["codes"][name]
    because: str = row["because"] if name.startswith("other.") else ""
    remedy: tuple[Remedy, ...] = ()
    table: Sequence[Mapping[str, str]] | None = None
    owner = _owner(exception) if exception is not None else "vllm"
    if text is not None and (row := rows["texts"].get(text.name)) is not None:
        because, table = row["because"], row["remedy"]
    elif code is Code.OTHER_ENGINE_ERROR and exception is not None and exception.name:
        frame = exception.frames[-1] if exception.frames else None
        place = printable(f" in {frame.function or '?'} ({frame.file.rpartition('/')[2]})", "") if frame is not None else ""
        because = f"{exception.name} was raised{place}, and nothing in the log points to memory"
        remedy, table = _of_owner(exception, owner), ()
    elif code is Code.OTHER_STOPPED_BY_OPERATOR and ServerProgress.UNKNOWN < case.facts.progress < ServerProgress.SERVING:
        why = "`failed liveness probe` there says that the start got too little time"
        because += "; it was still starting then, and a probe that gives up sends the same signal"
        remedy = (Remedy("kubectl describe pod NAME, and give that to doctor, too", why),)
    elif code is Code.OTHER_INSTALLATION and (missing := re.search(_NO_MODULE, case.line)):
        package = missing[1].partition(".")[0]
        because = f"the Python in which vLLM runs has no module {missing[1]}"
        found = rows["modules"].get(package, rows["modules"]["any"])
        table = [{**row, "do": row["do"].format(package=package)} for row in found]
    if code is Code.OTHER_UNSUPPORTED_GPU and owner not in ("vllm", "torch"):
        because = f"a kernel of {owner} has no implementation for this card"
        do = f"a build of {owner} for this architecture, or the server without it"
        remedy, table = (Remedy(do, "vLLM itself is not the one"),), ()
    said = printable(exception.message.partition("\n")[0], "").strip() if exception is not None else ""
    if said and code in _QUOTED:
        because += f": {without_values(redact(said))[:160]}"
    return Explanation(because, remedy, name, table=table)


def _of_owner(exception: LoggedException, owner: str) -> tuple[Remedy, ...]:
    """Whom to ask about an exception that nobody here knows, and how to see who is at fault."""
    files = " ".join(frame.file for frame in exception.frames)
    first: tuple[Remedy, ...] = ()
    if "kv_connector" in files or "lmcache" in files:
        flag, why = "--kv-transfer-config", "shows whether the KV connector is at fault"
        first = (Remedy(f"start once without {flag}", why, flag),)
    elif "spec_decode" in files or "eagle" in files:
        flag, why = "--speculative-config", "shows whether drafting is at fault"
        first = (Remedy(f"start once without {flag}", why, flag),)
    where = "vLLM's issues" if owner in ("vllm", "torch") else f"the issues of {owner} and of vLLM"
    do = f"search {where} for the exception quoted, and try the newest release"
    return (*first, Remedy(do, "most are known by that line"))


# Where the exception's own sentence says more than ours.
_QUOTED = (Code.OTHER_ENGINE_ERROR, Code.OTHER_BAD_CONFIG, Code.OTHER_BAD_MODEL)
_PACKAGE = r"(?:site|dist)-packages/([A-Za-z_]\w{1,40})/"
_STANDARD = frozenset({"multiprocessing", "concurrent", "asyncio", "ray", "starlette", "fastapi", "uvicorn", "uvloop"})


def _owner(exception: LoggedException) -> str:
    """The package whose call raised it; vLLM's own where none is named."""
    for frame in reversed(exception.frames):
        if (match := re.search(_PACKAGE, frame.file)) is not None and match[1] not in _STANDARD:
            return match[1]
    return "vllm"


_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_NEEDED = rf"{_NUMBER} GiB KV cache is needed.{{0,60}}available KV cache memory \({_NUMBER} GiB\)"
_ESTIMATE = r"estimated maximum model length is (\d{1,9})"
_CONTEXT = r"max seq len \((\d{1,9})\)"
_TOKENS = r"stored in KV cache \((\d{1,9})\)"
_MAMBA = r"max_num_seqs \((\d{1,9})\) exceeds available Mamba cache blocks \((\d{1,9})\)"
# What torch and the graphs need beside the cache at the least; a server told to take more of the card than this does not start.
HIGHEST_UTILIZATION = 0.97
SOMEBODY_ELSES_SHARE = 0.4  # of the card: no trial run takes that much beside small weights
FILLED_SHARE = 0.9  # weights beyond this leave no room that a setting could win


def no_cache_blocks(case: FailureCase) -> Explanation:
    """Nothing was left for the cache; whether more utilisation helps depends on what took it."""
    if (mamba := re.search(_MAMBA, case.line)) is not None:  # a model with Mamba layers keeps a whole block for each request
        requests, blocks = int(mamba[1]), int(mamba[2])
        because = "each request keeps a block of the cache for its Mamba state: "
        because += f"{format_count(requests)} requests at once need as many, and the cache has {format_count(blocks)}"
        fewer = [setting("--max-num-seqs", blocks, "as many as the cache has blocks")] if blocks else []
        return Explanation(because, [*fewer, *case.planned("--gpu-memory-utilization")], "too-few-mamba-blocks")
    kv, total, share = case.facts.measured.kv_bytes, case.total, case.utilization
    weights = case.facts.measured.weights_bytes or (case.plan.weights_bytes if case.plan else None)
    because = "weights and working memory leave nothing of vLLM's share of the card for the KV cache"
    if kv is not None:
        because += f": {gib(kv)} is what was left"
    if weights is not None and total is not None:
        because += f"; the weights alone take {gib(weights)} of the card's {gib(total)}"
    remedy: list[Remedy] = []
    # What neither weights nor usual working memory can have taken of the share.
    is_known = kv is not None and weights is not None and share is not None and total is not None
    others = round((share or 0) * (total or 0)) - (kv or 0) - (weights or 0)
    if is_known and others > max(SOMEBODY_ELSES_SHARE * (total or 0), weights or 0) and total:
        because += f"; that leaves {gib(others)} of the share that this server cannot have filled: another process held it"
        do = "look with nvidia-smi who else is on the card, and start servers one after the other"
        remedy.append(Remedy(do, "each measures the card while the other is filling it"))
    flag = "--gpu-memory-utilization"
    useless: tuple[str, ...] = ()
    if weights is not None and total is not None and weights > FILLED_SHARE * total:
        useless = (f"raising {flag}, as vLLM advises: the weights fill the card",)
    elif kv is None or not total or share is None:
        why = "helps only if the weights leave room on the card: compare them with its size first"
        guess = [setting(flag, "0.95", why)] if share is None or share < 0.95 else []
        remedy += case.planned(flag) or guess
    elif (needed := math.ceil((share + (max(0, -kv) + GIB) / total) * 100) / 100) > HIGHEST_UTILIZATION:
        useless = (f"raising {flag} alone, as vLLM advises: it would take {needed:.2f} of the card",)
    else:
        why = f"{gib(max(0, -kv))} are missing and a GiB of cache is little; costs the room that run-time peaks need"
        remedy += [*case.planned(flag), setting(flag, f"{needed:.2f}", why)]
    remedy += [
        setting("--max-num-batched-tokens", 2048, "less working memory; costs time to first token"),
        setting("--max-num-seqs", 64, "less working memory; costs parallelism"),
        *case.planned("--tensor-parallel-size"),
        Remedy("a quantised checkpoint", "halves or quarters the weights; test its answers"),
        setting("--tensor-parallel-size", 2 * case.parallel, "halves the weights a GPU; needs that many cards"),
    ]
    return Explanation(because, unique(remedy), useless=useless)


def context_too_long(case: FailureCase) -> Explanation:
    """One request of full length does not fit the cache."""
    needed, context, tokens, said = (re.search(one, case.line) for one in (_NEEDED, _CONTEXT, _TOKENS, _ESTIMATE))
    because = "one request of --max-model-len tokens needs more KV cache than there is"
    because += f": {needed[1]} GiB against {needed[2]} GiB" if needed is not None else ""
    because += f" (--max-model-len {context[1]})" if context is not None else ""
    because += f"; the cache holds {format_count(int(tokens[1]))} tokens" if tokens is not None else ""
    # The longest request that fits: as vLLM says it, else in proportion, whole blocks of 16.
    fits = 0
    if (said := said or tokens) is not None:
        fits = int(said[1])
    elif needed is not None and context is not None and float(needed[1]) > 0 and float(needed[2]) > 0:
        fits = int(int(context[1]) * float(needed[2]) / float(needed[1])) // 16 * 16
    if fits:
        why = "the longest that fits this cache; most services need less than a model's maximum"
        remedy = [setting("--max-model-len", fits, why)]
    else:
        remedy = [Remedy("--max-model-len N", "the length your requests really have", "--max-model-len")]
    remedy = unique([
        *remedy,
        *case.planned("--gpu-memory-utilization", "--kv-cache-dtype", "--tensor-parallel-size"),
        setting("--kv-cache-dtype", "fp8", "twice the tokens in the same memory; costs some accuracy"),
    ])  # fmt: skip
    if case.has(Behaviour.CONTEXT_AUTO_FIT):
        remedy.insert(1, setting("--max-model-len", "auto", "vLLM takes the longest that fits (0.14 and later)"))
    return Explanation(because, remedy)


def kv_allocation(case: FailureCase) -> Explanation:
    """The cache itself could not be taken."""
    because = f"vLLM had worked out the size of the KV cache, and the card did not have it any more: {request_clause(case)}"
    given, oom, weights = case.number(BY_HAND), case.oom, case.facts.measured.weights_bytes
    if given is not None:
        because += "; --kv-cache-memory-bytes sets it by hand, so nothing was measured"
        # Room for what comes after the cache: sampling at full width and graphs took up to 2.6 GiB of an H200.
        peaks, fits = max(2 * GIB, round(0.03 * (case.total or 0))), 0
        if oom.free is not None and oom.tried is not None:
            if oom.tried > given // 2:  # the cache in one piece
                fits = oom.free - peaks
            elif oom.allocated is not None and weights is not None:  # layer by layer: what the first ones took counts too
                fits = min(given, oom.allocated - weights + oom.free - peaks)
        why = "what was free, less 3 % of the card for the trial runs that follow"
        return Explanation(because, [smaller_cache(given, fits, why)], "kv-allocation-by-hand")
    if (share := lower_utilization(case, max(case.missing or 0, 512 * MIB))) is not None:
        return Explanation(because, [setting("--gpu-memory-utilization", share, "a smaller cache")])
    lower = "a lower --gpu-memory-utilization, by 0.02 to 0.05"
    return Explanation(because, [Remedy(lower, "a smaller cache", "--gpu-memory-utilization")])


_CHECK = rf"{FREE_OF_TOTAL}startup.{{0,80}}\({POSITIVE}, {POSITIVE} GiB\)"
_PROFILED = rf"Initial free memory:? {POSITIVE}( GiB)?.{{0,60}}?current free memory:? {POSITIVE}"


def weights(case: FailureCase) -> Explanation:
    """The weights did not fit on the card."""
    oom = case.oom
    because = "torch ran out of GPU memory while the model's weights were put on the card"
    if oom.total is not None and oom.own is not None:
        because += f": {gib(oom.own)} of {gib(oom.total)} were already taken by this process"
    if case.plan is not None and case.plan.weights_bytes is not None:
        because += f"; plan computes {gib(case.plan.weights_bytes)} of weights a GPU for this command"
    row = "weights-and-adapters" if case.facts.flags.get("enable_lora") == "True" else ""
    return Explanation(because, case.planned("--tensor-parallel-size", "--pipeline-parallel-size"), row)


def free_memory(case: FailureCase) -> Explanation:
    """Another process held the memory."""
    because, share = _held(case)
    frames = case.symptom.exception.frames if case.symptom.exception is not None else ()
    if any(part in frame.file for frame in frames for part in TRAINER_FILES):
        because += "; a trainer runs in this process, and most of that is its own"
        return Explanation(because, share, "trainer-holds-memory")
    return Explanation(because, share)


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
    return Explanation(because, [*remedy, *case.planned("--tensor-parallel-size")])


def profile_neighbour(case: FailureCase) -> Explanation:
    """Memory was released by somebody else while vLLM measured."""
    profiled = re.search(_PROFILED, case.line)
    because = (
        "more memory was free after the trial run than before it: another process let go of memory while vLLM measured, "
        "so its figures mean nothing"
    )
    if profiled is not None and profiled[2]:  # early releases print bytes
        because += f" ({profiled[1]} GiB free before, {profiled[3]} after)"
    why = "gives the cache a fixed size and skips the measurement (0.10.2 and later)"
    fixed = Remedy("--kv-cache-memory-bytes N", why, "--kv-cache-memory-bytes")
    return Explanation(because, [fixed] if case.has(Behaviour.FIXED_CACHE_SIZE) is not False else [])


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
    return Explanation(because, remedy)


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
    said = f": {without_values(printable(refused[1], '').strip())}" if refused is not None else ""
    return Explanation(f"vLLM's own parser refused the command{said}")


def forward(case: FailureCase) -> Explanation:
    """Activations of a step did not fit."""
    tokens = case.max_num_batched_tokens
    because = f"a step of the model ran out of GPU memory while serving: {request_in_pieces(case)}"
    if (running := case.facts.scheduler.get("num_running_reqs")) is not None:
        because += f"; {running:.0f} requests were running" if running != 1 else "; one request was running"
    because += (
        ". KV blocks running out never does this (vLLM preempts instead): "
        "the peak of a step went past what the start had measured"
    )
    smaller, why = max(2048, (tokens or 8192) // 2), "smaller steps; costs time to first token on long prompts"
    return Explanation(because, [setting("--max-num-batched-tokens", smaller, why)] if tokens is None or tokens > 2048 else [])


def logits(case: FailureCase) -> Explanation:
    """Logits, sampling or log-probabilities."""
    exception = case.symptom.exception
    wanted = exception is not None and any("prompt_logprobs" in name for name in exception.functions())
    asked_for = " for a request that wants prompt_logprobs" if wanted else ""
    because = f"turning the model's output into tokens{asked_for} ran out of GPU memory: {request_in_pieces(case)}"
    if case.plan is not None and case.plan.vocab_size and case.oom.tried:
        rows = case.oom.tried / (case.plan.vocab_size * 4)
        because += f"; that is {rows:,.0f} rows of {format_count(case.plan.vocab_size)} words at 4 bytes"
    requests = case.max_num_seqs
    fewer = 256 if requests is None or requests > 256 else max(8, requests // 2)
    return Explanation(because, [setting("--max-num-seqs", fewer, "fewer rows at once")])


def multimodal(case: FailureCase) -> Explanation:
    """The encoder of images, video or sound."""
    because, remedy = f"the encoder of images, video or sound ran out of GPU memory: {request_in_pieces(case)}", []
    if case.facts.flags.get("skip_mm_profiling") == "True":
        because += "; with --skip-mm-profiling the start left no room for it"
        sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override")  # beside a cache of a given size no room is kept
        by_hand = "".join(f" and --{name.replace('_', '-')}" for name in sizes if case.number(name))
        why = "the start then tries the largest input and keeps room for it"
        remedy.append(Remedy(f"leave out --skip-mm-profiling{by_hand}", why, "--skip-mm-profiling"))
    return Explanation(because, remedy)


def neighbour(case: FailureCase) -> Explanation:
    """Another process grew on the same card."""
    oom = case.oom
    listed = ", ".join(f"process {pid} with {gib(size)}" for pid, size in oom.neighbours)
    because = f"other processes hold {gib(oom.others) if oom.others else 'memory'} of this GPU's {gib(oom.total)}"
    because += f" ({listed})" if listed else ""
    because += f", so this server, which holds {gib(oom.own)}, could not get another {gib(oom.tried)}"
    return Explanation(because)


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
    name, exception = case.symptom.text.name if case.symptom.text is not None else "", case.symptom.exception
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
    is_pinned = name == "host-alloc" or (exception is not None and "pin_memory" in exception.functions())
    rows = {"shm": "shared-memory", "swap-too-large": "swap-too-large", "ray": "killed-by-ray"}
    row = next((row for start, row in rows.items() if name.startswith(start)), "pinned-memory" if is_pinned else "")
    return Explanation(row=row)


def preemption(case: FailureCase) -> Explanation:
    """The first engine gave up for want of swap space."""
    fewer = max(8, (case.max_num_seqs or V0_REQUESTS_AT_ONCE) // 2)
    why = "half as many: fewer requests at once are faster than recomputed ones"
    return Explanation(remedy=[setting("--max-num-seqs", fewer, why)])


V0_REQUESTS_AT_ONCE = 256  # the first engine's --max-num-seqs where none was given


EXPLAIN: dict[Code, Callable[[FailureCase], Explanation]] = {
    Code.STARTUP_WEIGHTS_DO_NOT_FIT: weights, Code.STARTUP_FREE_MEMORY_CHECK: free_memory,
    Code.STARTUP_PROFILE_RUN: profile_run, Code.STARTUP_PROFILE_NEIGHBOUR: profile_neighbour,
    Code.STARTUP_NO_CACHE_BLOCKS: no_cache_blocks, Code.STARTUP_CONTEXT_TOO_LONG: context_too_long,
    Code.STARTUP_KV_ALLOCATION: kv_allocation, Code.STARTUP_GRAPH_CAPTURE: graph_capture,
    Code.STARTUP_SAMPLER_WARMUP: sampler_warmup, Code.STARTUP_BAD_FLAG: bad_flag,
    Code.RUNTIME_FORWARD: forward, Code.RUNTIME_LOGITS: logits, Code.RUNTIME_MULTIMODAL: multimodal,
    Code.RUNTIME_NEIGHBOUR: neighbour,
    Code.ALLOCATOR_FRAGMENTATION: fragmentation,
    Code.HOST_OUT_OF_MEMORY: host, Code.KV_PREEMPTION_STORM: preemption,
}  # fmt: skip
