"""Explains a root cause, by its code: title, reason and remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from plimsoll.doctor.remedies import runtime, start
from plimsoll.doctor.rules.facts import (
    BY_HAND,
    Explanation,
    FailureCase,
    gib,
    lower_utilization,
    request_clause,
    setting,
    smaller_cache,
    unique,
    without_values,
)
from plimsoll.doctor.rules.timeline import LoggedException, ServerProgress
from plimsoll.doctor.words import remedies, words
from plimsoll.findings import Code, Remedy
from plimsoll.redaction import redact
from plimsoll.units import GIB, MIB, format_count
from plimsoll.vllm.versions import Behaviour

_NO_MODULE = r"No module named '([\w.]{1,80})'"


def explain(case: FailureCase) -> Explanation:
    """The reason and the computed remedies, by the code; words from the table for the codes that nothing is computed for."""
    return EXPLAIN.get(case.symptom.code, other)(case)


def other(case: FailureCase) -> Explanation:
    """Words for the codes that no computed explanation covers; the text that gave them away is the evidence."""
    code, text, exception = case.symptom.code, case.symptom.text, case.symptom.exception
    rows = words("causes")
    row = rows["codes"].get(str(code), {})
    name = str(code) if "because" in row else str(Code.OTHER_ENGINE_ERROR)
    row = rows["codes"][name]
    because, remedy = row["because"], remedies(row["remedy"])
    owner = _owner(exception) if exception is not None else "vllm"
    if text is not None and (row := rows["texts"].get(text.name)) is not None:
        because, remedy = row["because"], remedies(row["remedy"])
    elif code is Code.OTHER_ENGINE_ERROR and exception is not None and exception.name:
        frame = exception.frames[-1] if exception.frames else None
        place = _printable(f" in {frame.function or '?'} ({frame.file.rpartition('/')[2]})") if frame is not None else ""
        because = f"{exception.name} was raised{place}, and nothing in the log points to memory"
        remedy = _of_owner(exception, owner)
    elif code is Code.OTHER_STOPPED_BY_OPERATOR and ServerProgress.UNKNOWN < case.facts.progress < ServerProgress.SERVING:
        why = "`failed liveness probe` there says that the start got too little time"
        because += "; it was still starting then, and a probe that gives up sends the same signal"
        remedy = (Remedy("kubectl describe pod NAME, and give that to doctor, too", why), *remedy)
    elif code is Code.OTHER_INSTALLATION and (missing := re.search(_NO_MODULE, case.line)):
        package = missing[1].partition(".")[0]
        because = f"the Python in which vLLM runs has no module {missing[1]}"
        table = rows["modules"].get(package, rows["modules"]["any"])
        remedy = remedies({**row, "do": row["do"].format(package=package)} for row in table)
    if code is Code.OTHER_UNSUPPORTED_GPU and owner not in ("vllm", "torch"):
        because = f"a kernel of {owner} has no implementation for this card"
        remedy = (Remedy(f"a build of {owner} for this architecture, or the server without it", "vLLM itself is not the one"),)
    said = _printable(exception.message.partition("\n")[0]).strip() if exception is not None else ""
    if said and code in _QUOTED:
        because += f": {without_values(redact(said))[:160]}"
    return Explanation(because, remedy, name)


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


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())


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
        return Explanation(because, unique([*fewer, *case.planned("--gpu-memory-utilization")]), "too-few-mamba-blocks")
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


EXPLAIN: dict[Code, Callable[[FailureCase], Explanation]] = {
    Code.STARTUP_WEIGHTS_DO_NOT_FIT: start.weights, Code.STARTUP_FREE_MEMORY_CHECK: start.free_memory,
    Code.STARTUP_PROFILE_RUN: start.profile_run, Code.STARTUP_PROFILE_NEIGHBOUR: start.profile_neighbour,
    Code.STARTUP_NO_CACHE_BLOCKS: no_cache_blocks, Code.STARTUP_CONTEXT_TOO_LONG: context_too_long,
    Code.STARTUP_KV_ALLOCATION: kv_allocation, Code.STARTUP_GRAPH_CAPTURE: start.graph_capture,
    Code.STARTUP_SAMPLER_WARMUP: start.sampler_warmup, Code.STARTUP_BAD_FLAG: start.bad_flag,
    Code.RUNTIME_FORWARD: runtime.forward, Code.RUNTIME_LOGITS: runtime.logits, Code.RUNTIME_MULTIMODAL: runtime.multimodal,
    Code.RUNTIME_LORA: runtime.lora, Code.RUNTIME_NEIGHBOUR: runtime.neighbour, Code.RUNTIME_WAKE_UP: runtime.wake_up,
    Code.RUNTIME_COLLECTIVES: runtime.collectives, Code.ALLOCATOR_FRAGMENTATION: runtime.fragmentation,
    Code.HOST_OUT_OF_MEMORY: runtime.host, Code.KV_PREEMPTION_STORM: runtime.preemption,
}  # fmt: skip
