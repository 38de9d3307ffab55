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
_NOT_MEMORY = ("any memory setting: this is not a memory failure",)


def other(case: FailureCase) -> Explanation:
    """Words for the codes that no computed explanation covers; the text that gave them away is the evidence."""
    code, text, exception = case.symptom.code, case.symptom.text, case.symptom.exception
    rows = words("causes")
    row = rows["codes"].get(str(code)) or rows["codes"][str(Code.OTHER_ENGINE_ERROR)]
    title, because, remedy = row["title"], row["because"], remedies(row["remedy"])
    if text is not None and (row := rows["texts"].get(text.name)) is not None:
        because, remedy = row["because"], remedies(row["remedy"])
    elif code is Code.OTHER_ENGINE_ERROR and exception is not None and exception.name:
        because = f"{exception.name} was raised{_where(exception)}, and nothing in the log points to memory"
        remedy = _of_owner(exception)
    elif code is Code.OTHER_STOPPED_BY_OPERATOR and ServerProgress.UNKNOWN < case.facts.progress < ServerProgress.SERVING:
        why = "`failed liveness probe` there says that the start got too little time"
        asks = Remedy("kubectl describe pod NAME, and give that to doctor, too", why)
        because, remedy = (
            f"{because}; it was still starting then, and a probe that gives up sends the same signal",
            (asks, *remedy),
        )
    elif code is Code.OTHER_INSTALLATION and (missing := re.search(_NO_MODULE, case.line)):
        because, remedy = _missing(missing[1])
    owner = _owner(exception) if exception is not None else "vllm"
    if code is Code.OTHER_UNSUPPORTED_GPU and owner not in ("vllm", "torch"):
        because = f"a kernel of {owner} has no implementation for this card"
        remedy = (Remedy(f"a build of {owner} for this architecture, or the server without it", "vLLM itself is not the one"),)
    said = _printable(exception.message.partition("\n")[0]).strip() if exception is not None else ""
    if said and code in _QUOTED:
        because += f": {without_values(redact(said))[:160]}"
    return Explanation(title, because, remedy, () if code.is_memory else _NOT_MEMORY)


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


def _of_owner(exception: LoggedException) -> tuple[Remedy, ...]:
    """Whom to ask about an exception that nobody here knows, and how to see who is at fault."""
    owner, files = _owner(exception), " ".join(frame.file for frame in exception.frames)
    found = []
    if "kv_connector" in files or "lmcache" in files:
        found.append(
            Remedy(
                "start once without --kv-transfer-config", "shows whether the KV connector is at fault", "--kv-transfer-config"
            )
        )
    elif "spec_decode" in files or "eagle" in files:
        found.append(
            Remedy("start once without --speculative-config", "shows whether drafting is at fault", "--speculative-config")
        )
    where = "vLLM's issues" if owner in ("vllm", "torch") else f"the issues of {owner} and of vLLM"
    found.append(Remedy(f"search {where} for the exception quoted, and try the newest release", "most are known by that line"))
    return tuple(found)


def _missing(module: str) -> tuple[str, tuple[Remedy, ...]]:
    """A package that was asked for and is not there; one of ours is asked for by a flag of the user's own."""
    because = f"the Python in which vLLM runs has no module {module}"
    if module.partition(".")[0] == "plimsoll":
        ours = Remedy("bring it there, by pip or as one mounted file: plimsoll inside wheel", "it prints each way")
        flags = "--middleware and --worker-extension-cls"
        return because, (ours, Remedy(f"start without {flags} until then", "vLLM itself does not need it"))
    package = module.partition(".")[0]
    if package == "vllm":
        why = "a worker is started with the Python of its own node"
        return because, (Remedy("the same image or environment, with the same vLLM, on every node and in every worker", why),)
    return because, (
        Remedy(
            f"install what brings {package} where vLLM runs, or leave out the flag that asks for it", "nothing starts without"
        ),
        Remedy(
            "an image or environment made for this release of vLLM", "one that was upgraded in part lacks what the rest needs"
        ),
    )


def _where(exception: LoggedException) -> str:
    if not exception.frames:
        return ""
    frame = exception.frames[-1]
    return _printable(f" in {frame.function or '?'} ({frame.file.rpartition('/')[2]})")


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
    if (mamba := re.search(_MAMBA, case.line)) is not None:
        return _too_few_states(case, int(mamba[1]), int(mamba[2]))
    kv, total = case.facts.measured.kv_bytes, case.total
    weights = case.facts.measured.weights_bytes or (case.plan.weights_bytes if case.plan else None)
    because = "weights and working memory leave nothing of vLLM's share of the card for the KV cache"
    if kv is not None:
        because += f": {gib(kv)} is what was left"
    if weights is not None and total is not None:
        because += f"; the weights alone take {gib(weights)} of the card's {gib(total)}"
    remedy, not_remedies = _more_of_the_card(case, weights)
    if (others := _unexplained(case, weights)) is not None:
        because += f"; that leaves {gib(others)} of the share that this server cannot have filled: another process held it"
        remedy = [
            Remedy("look with nvidia-smi who else is on the card, and start servers one after the other",
                   "each measures the card while the other is filling it"),
            *remedy,
        ]  # fmt: skip
    remedy += [
        setting("--max-num-batched-tokens", 2048, "less working memory; costs time to first token"),
        setting("--max-num-seqs", 64, "less working memory; costs parallelism"),
        *case.planned(["--tensor-parallel-size"]),
        Remedy("a quantised checkpoint", "halves or quarters the weights; test its answers"),
        setting("--tensor-parallel-size", 2 * case.parallel, "halves the weights a GPU; needs that many cards"),
    ]  # fmt: skip
    not_remedies += [
        "--max-model-len: not one block is left, whatever the length",
        "--kv-cache-dtype fp8: half of nothing is nothing",
    ]
    return Explanation("nothing is left for the KV cache", because, unique(remedy), not_remedies)


def _more_of_the_card(case: FailureCase, weights: int | None) -> tuple[list[Remedy], list[str]]:
    """True if a larger share helps: offered where the figures allow it, refused where they do not."""
    kv, total, share = case.facts.measured.kv_bytes, case.total, case.utilization
    if weights is not None and total is not None and weights > FILLED_SHARE * total:
        return [], ["raising --gpu-memory-utilization, as vLLM advises: the weights fill the card"]
    if kv is None or not total or share is None:
        planned = case.planned(["--gpu-memory-utilization"])
        guess = setting("--gpu-memory-utilization", "0.95",
                        "helps only if the weights leave room on the card: compare them with its size first")  # fmt: skip
        return planned or ([guess] if share is None or share < 0.95 else []), []
    needed = math.ceil((share + (max(0, -kv) + GIB) / total) * 100) / 100
    if needed > HIGHEST_UTILIZATION:
        return [], [f"raising --gpu-memory-utilization alone, as vLLM advises: it would take {needed:.2f} of the card"]
    why = f"{gib(max(0, -kv))} are missing and a GiB of cache is little; costs the room that run-time peaks need"
    return [*case.planned(["--gpu-memory-utilization"]), setting("--gpu-memory-utilization", f"{needed:.2f}", why)], []


def _unexplained(case: FailureCase, weights: int | None) -> int | None:
    """The part of the share that neither weights nor usual working memory can have taken; None where it is small."""
    kv, total, share = case.facts.measured.kv_bytes, case.total, case.utilization
    if kv is None or weights is None or not total or share is None:
        return None
    left = round(share * total) - kv - weights
    return left if left > max(SOMEBODY_ELSES_SHARE * total, weights) else None


def _too_few_states(case: FailureCase, requests: int, blocks: int) -> Explanation:
    """A model with Mamba layers keeps a whole block for each request."""
    because = "each request keeps a block of the cache for its Mamba state: "
    because += f"{format_count(requests)} requests at once need as many, and the cache has {format_count(blocks)}"
    remedy = [setting("--max-num-seqs", blocks, "as many as the cache has blocks")] if blocks else []
    remedy += [
        *case.planned(["--gpu-memory-utilization"]),
        Remedy("a higher --gpu-memory-utilization, where the card has room", "more blocks", "--gpu-memory-utilization"),
    ]
    not_remedies = ["--max-model-len: a state is as large for a short request as for a long one"]
    return Explanation("the KV cache has fewer blocks than requests at once", because, unique(remedy), not_remedies)


def context_too_long(case: FailureCase) -> Explanation:
    """One request of full length does not fit the cache."""
    needed, context, tokens = (re.search(one, case.line) for one in (_NEEDED, _CONTEXT, _TOKENS))
    because = "one request of --max-model-len tokens needs more KV cache than there is"
    because += f": {needed[1]} GiB against {needed[2]} GiB" if needed is not None else ""
    because += f" (--max-model-len {context[1]})" if context is not None else ""
    because += f"; the cache holds {format_count(int(tokens[1]))} tokens" if tokens is not None else ""
    fits = _longest(case.line)
    if fits:
        why = "the longest that fits this cache; most services need less than a model's maximum"
        remedy = [setting("--max-model-len", fits, why)]
    else:
        remedy = [Remedy("--max-model-len N", "the length your requests really have", "--max-model-len")]
    remedy += [
        *case.planned(["--gpu-memory-utilization", "--kv-cache-dtype", "--tensor-parallel-size"]),
        setting("--kv-cache-dtype", "fp8", "twice the tokens in the same memory; costs some accuracy"),
        Remedy("a higher --gpu-memory-utilization, where the card has room", "every 0.01 is 1 % of the card for the cache",
               "--gpu-memory-utilization"),
    ]  # fmt: skip
    not_remedies = [
        "--max-num-seqs, --max-num-batched-tokens (beyond a little): the length of one request is the trouble",
        "--enforce-eager, except for the memory of the graphs from 0.20 on",
        "switching prefix caching off: it takes nothing from the cache",
    ]
    offers = unique(remedy)
    if case.has(Behaviour.CONTEXT_AUTO_FIT):
        offers.insert(1, setting("--max-model-len", "auto", "vLLM takes the longest that fits (0.14 and later)"))
    return Explanation("one request of full length does not fit the KV cache", because, offers, not_remedies)


def _longest(line: str) -> int | None:
    """The longest request that fits: as vLLM says it, else in proportion, whole blocks of 16."""
    for pattern in (_ESTIMATE, _TOKENS):
        if (said := re.search(pattern, line)) is not None:
            return int(said[1])
    needed, context = re.search(_NEEDED, line), re.search(_CONTEXT, line)
    if needed is None or context is None or float(needed[1]) <= 0 or float(needed[2]) <= 0:
        return None
    return int(int(context[1]) * float(needed[2]) / float(needed[1])) // 16 * 16


def kv_allocation(case: FailureCase) -> Explanation:
    """The cache itself could not be taken."""
    because = f"vLLM had worked out the size of the KV cache, and the card did not have it any more: {request_clause(case)}"
    given, remedy = case.number(BY_HAND), []
    if given is not None:
        because += "; --kv-cache-memory-bytes sets it by hand, so nothing was measured"
        remedy.append(
            smaller_cache(given, _fitting(case, given), "what was free, less 3 % of the card for the trial runs that follow")
        )
    elif (share := lower_utilization(case, max(case.missing or 0, 512 * MIB))) is not None:
        remedy.append(setting("--gpu-memory-utilization", share, "a smaller cache"))
    else:
        remedy.append(
            Remedy("a lower --gpu-memory-utilization, by 0.02 to 0.05", "a smaller cache", "--gpu-memory-utilization")
        )
    remedy.append(Remedy("see with nvidia-smi whether another process took memory in between",
                         "between measuring and allocating a neighbour may grow"))  # fmt: skip
    not_remedies = [
        "--max-model-len: the cache takes its whole share whatever the length",
        "a higher --gpu-memory-utilization: the cache grows with it",
    ]
    if given is not None:
        not_remedies[1] = "--gpu-memory-utilization, in either direction: it has no say where --kv-cache-memory-bytes is set"
    return Explanation("the KV cache could not be allocated", because, remedy, not_remedies)


def _peaks(case: FailureCase) -> int:
    """Room for what comes after the cache: sampling at full width and graphs took up to 2.6 GiB of an H200."""
    return max(2 * GIB, round(0.03 * (case.total or 0)))


def _fitting(case: FailureCase, given: int) -> int:
    """The size the cache could have had: free memory and what it had already taken; 0 where that is unknown."""
    oom, weights = case.oom, case.facts.measured.weights_bytes
    if oom.free is None or oom.tried is None:
        return 0
    if oom.tried > given // 2:  # the cache in one piece
        return max(0, oom.free - _peaks(case))
    if oom.allocated is not None and weights is not None:  # layer by layer: what the first layers took counts too
        return min(given, max(0, oom.allocated - weights + oom.free - _peaks(case)))
    return 0


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
