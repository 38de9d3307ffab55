"""Failures that are not about memory: what they are, so that nobody tunes memory for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plimsoll.doctor.case import Case
from plimsoll.doctor.explained import Explained
from plimsoll.doctor.steps import Progress
from plimsoll.doctor.tracebacks import Raised
from plimsoll.domain.finding import Code, Remedy

_NO_MODULE = r"No module named '([\w.]{1,80})'"
_NOT_MEMORY = ("any memory setting: this is not a memory failure",)


def other(case: Case) -> Explained:
    """Words for the codes that no computed explanation covers; the text that gave them away is the evidence."""
    code, text, raised = case.complaint.code, case.complaint.text, case.complaint.raised
    title, because, remedy = _BY_CODE.get(code) or ELSEWHERE.get(code) or _BY_CODE[Code.OTHER_ENGINE_ERROR]
    if text is not None and text.name in _BY_TEXT:
        because, remedy = _BY_TEXT[text.name]
    elif code is Code.OTHER_ENGINE_ERROR and raised is not None and raised.name:
        because = f"{raised.name} was raised{_where(raised)}, and nothing in the log points to memory"
    elif code is Code.OTHER_STOPPED_BY_OPERATOR and Progress.UNKNOWN < case.facts.progress < Progress.SERVING:
        because, remedy = _stopped_while_starting(because, remedy)
    elif code is Code.OTHER_INSTALLATION and (missing := re.search(_NO_MODULE, case.line)):
        because, remedy = _missing(missing[1])
    return Explained(title, because, remedy, () if code.is_memory else _NOT_MEMORY)


def _stopped_while_starting(because: str, remedy: Sequence[Remedy]) -> tuple[str, tuple[Remedy, ...]]:
    """A server that never came up: it may have been wanted, and a probe that gave up sends the same signal."""
    why = "`failed liveness probe` there says that the start got too little time"
    asks = Remedy("kubectl describe pod NAME, and give that to doctor, too", why)
    return f"{because}; it was still starting then, and a probe that gives up sends the same signal", (asks, *remedy)


def _missing(module: str) -> tuple[str, tuple[Remedy, ...]]:
    """A package that was asked for and is not there; one of ours is asked for by a flag of the user's own."""
    because = f"the Python in which vLLM runs has no module {module}"
    if module.partition(".")[0] == "plimsoll":
        ours = Remedy("bring it there, by pip or as one mounted file: plimsoll inside wheel", "it prints each way")
        flags = "--middleware and --worker-extension-cls"
        return because, (ours, Remedy(f"start without {flags} until then", "vLLM itself does not need it"))
    package = module.partition(".")[0]
    return because, (
        Remedy(
            f"install what brings {package} where vLLM runs, or leave out the flag that asks for it", "nothing starts without"
        ),
        Remedy(
            "an image or environment made for this release of vLLM", "one that was upgraded in part lacks what the rest needs"
        ),
    )


def _where(raised: Raised) -> str:
    if not raised.frames:
        return ""
    frame = raised.frames[-1]
    place = f" in {frame.function or '?'} ({frame.file.rpartition('/')[2]})"
    return "".join(letter for letter in place if letter.isprintable())


Words = tuple[str, str, tuple[Remedy, ...]]  # title, because, remedies
_BY_CODE: dict[Code, Words] = {
    Code.OTHER_BAD_MODEL: (
        "the model cannot be loaded", "the model's files, name or architecture are not what this vLLM can load",
        (Remedy("check the model's id or folder, and that its files are whole",
                "the line quoted says which is missing or wrong"),
         Remedy("a newer vLLM and transformers", "new architectures need new releases")),
    ),
    Code.OTHER_GATED_MODEL: (
        "the Hugging Face hub refuses access to the model", "the account or token may not read this model",
        (Remedy("accept the model's terms on its page, and set HF_TOKEN", "gated models ask for both"),
         Remedy("pass the token into the container", "a token on the host does not reach it by itself")),
    ),
    Code.OTHER_DOWNLOAD: (
        "the model could not be downloaded", "the hub could not be reached, or the files are not in the cache while offline",
        (Remedy("check name resolution, proxy and HF_HUB_OFFLINE", "the start needs the files before the GPU"),
         Remedy("download first: hf download MODEL, then mount the cache", "a start should not depend on the network")),
    ),
    Code.OTHER_PORT_IN_USE: (
        "the port is taken", "another process, often a server that has not gone yet, listens on it",
        (Remedy("--port N, or stop the other one", "ss -ltnp names it", "--port"),),
    ),
    Code.OTHER_STOPPED_BY_OPERATOR: (
        "it was stopped on purpose", "the log shows a signal or a stop request before anything else went wrong",
        (Remedy("nothing to fix in vLLM; find who stopped it", "an operator, a deploy, a probe or a script"),),
    ),
    Code.OTHER_ILLEGAL_ACCESS: (
        "a GPU kernel did something illegal", "a kernel read or wrote where it must not; the GPU context is lost with it",
        (Remedy("look for an Xid line in dmesg", "it tells a faulty card from a faulty kernel"),
         Remedy("CUDA_LAUNCH_BLOCKING=1 once, to see the true place", "errors of kernels are reported late"),
         Remedy("another --attention-backend, or a newer vLLM", "most are bugs of one kernel for one shape")),
    ),
    Code.OTHER_COLLECTIVES: (
        "communication between the GPUs failed", "NCCL or Gloo failed or timed out; another rank may have died first",
        (Remedy("look at the other ranks' logs for an earlier error", "a rank that died shows up elsewhere as a time-out"),
         Remedy("NCCL_DEBUG=INFO once", "names the interface or the GPU that failed")),
    ),
    Code.OTHER_COMPILER: (
        "a compiler failed", "torch.compile, Triton or a kernel build did not succeed",
        (Remedy("--enforce-eager once, to see whether only compilation fails", "runs without torch.compile", "--enforce-eager"),
         Remedy("install the compiler and headers the line names, or clear the compile caches",
                "images without gcc or nvcc cannot build kernels")),
    ),
    Code.OTHER_HARDWARE: (
        "the GPU or its link failed", "the driver reports a fault of the hardware",
        (Remedy("take the card out of service and run its diagnostics (dcgmi diag)", "it will fail again"),),
    ),
    Code.OTHER_INSTALLATION: (
        "the installation does not fit together", "a driver, a library or a Python package is missing or of the wrong version",
        (Remedy("make driver, CUDA, torch and vLLM match", "the line quoted names the one that does not"),),
    ),
    Code.OTHER_UNSUPPORTED_GPU: (
        "this GPU cannot run what was asked", "a kernel, a number format or a quantisation has no implementation for this card",
        (Remedy("another quantisation, dtype or --attention-backend", "one with kernels for this card", "--attention-backend"),
         Remedy("a vLLM build for this architecture", "new cards need new builds")),
    ),
    Code.OTHER_BAD_CONFIG: (
        "the settings contradict each other or the model", "vLLM refused a setting that this model or machine cannot have",
        (Remedy("change the setting the line names", "it was refused before any memory was taken"),),
    ),
    Code.OTHER_DISK: (
        "the disk is full or not writable", "a file could not be written",
        (Remedy("free the disk or mount the caches elsewhere (HF_HOME, VLLM_CACHE_ROOT, TMPDIR)",
                "weights and compile caches are large"),),
    ),
    Code.OTHER_TIMEOUT: (
        "one part waited too long for another", "a time-out ended it; what it waited for is not in the log",
        (Remedy("look at the last lines of the process that did not answer", "it hung, died, or is merely slow to load"),),
    ),
    Code.OTHER_ENGINE_ERROR: (
        "the engine failed with an error of its own", "an exception ended the engine, and it is not about memory",
        (Remedy("search vLLM's issues for the exception quoted", "with the version above"),),
    ),
    Code.OTHER_KILLED: (
        "it was killed", "the process got SIGKILL; the log does not say from whom",
        (Remedy("dmesg -T | grep -i -e oom -e killed", "tells the kernel's out-of-memory killer from a person"),),
    ),
    Code.OTHER_PROBE: (
        "a probe ended it", "the health check gave up on a server that had not failed",
        (Remedy("give the start more time, with a startup probe of its own", "loading and compiling take minutes"),),
    ),
    Code.ENGINE_DEAD: (
        "the engine died", "the log ends in the engine's death and names no cause",
        (Remedy("dmesg -T | grep -i -e oom -e killed -e xid, and kubectl describe pod", "they say who ended it"),),
    ),
    Code.ENGINE_WEDGED: (
        "the engine stopped working without dying", "its processes waited for one another, and nothing was done afterwards",
        (Remedy("py-spy dump of every VLLM:: process before it is restarted", "shows which one the others wait for"),
         Remedy("look at the other ranks' logs for an earlier error", "one that died or hangs stops all"),
         Remedy("restart the server", "it does not recover by itself")),
    ),
    Code.ENGINE_CRASH_LOOP: (
        "the server fails again and again", "starting again changes nothing while the cause stays",
        (Remedy("stop the restarts, fix the cause, then start once", "each start takes the card from the others"),),
    ),
}  # fmt: skip

# What metrics, trends and snapshots show: a log alone never leads here, and then says only that much.
ELSEWHERE: dict[Code, Words] = {
    Code.GPU_GROWTH: ("GPU memory grows", "more is held on the card than the start had measured", ()),
    Code.HOST_GROWTH: ("host memory grows", "the server's processes hold more and more of the host's memory", ()),
    Code.KV_SATURATED: ("the KV cache is full", "requests wait because no KV blocks are free", ()),
    Code.KV_INTERNAL_FRAGMENTATION: ("blocks of the KV cache are partly empty", "blocks are larger than what fills them", ()),
    Code.PREFIX_CACHE_LOW_HIT_RATE: ("the prefix cache is of little use", "few prompts begin like an earlier one", ()),
    Code.ENGINE_SATURATED: ("the engine has more work than it can do", "requests wait although the KV cache has room", ()),
}

_TOO_MANY_RANKS = (
    "more ranks were asked for than GPUs are visible",
    (Remedy("fewer --data-parallel-size or --tensor-parallel-size, or more cards in CUDA_VISIBLE_DEVICES", "one GPU a rank"),),
)
_INDIVISIBLE = (
    "a size of the model does not divide by the number of GPUs",
    (Remedy("--tensor-parallel-size 1, 2, 4 or 8", "heads and vocabulary must divide", "--tensor-parallel-size"),),
)
# Where the text itself allows a truer sentence than its code.
_BY_TEXT: dict[str, tuple[str, tuple[Remedy, ...]]] = {
    "longer-than-derived": (
        "--max-model-len is larger than the model's own maximum",
        (Remedy("--max-model-len at most what the line names", "the model was not made for more", "--max-model-len"),),
    ),
    "rank-out-of-bounds": _TOO_MANY_RANKS,
    "too-few-gpus": _TOO_MANY_RANKS,
    "ray-too-few-gpus": _TOO_MANY_RANKS,
    "invalid-ordinal": _TOO_MANY_RANKS,
    "not-divisible": _INDIVISIBLE,
    "must-be-divisible": _INDIVISIBLE,
    "too-many-files": (
        "the server may not open as many files and connections as it needs",
        (Remedy("ulimit -n 65535 before the start (docker: --ulimit nofile=65535)", "each connection is an open file"),),
    ),
    "batch-below-length": (
        "--max-num-batched-tokens is below --max-model-len, and chunked prefill is off: a full prompt could never run",
        (Remedy("--enable-chunked-prefill, or --max-num-batched-tokens of at least --max-model-len", "a prompt must fit a step",
                "--enable-chunked-prefill"),),
    ),
    "shared-memory-limit": (
        "a kernel needs more of the GPU's on-chip shared memory than this card has; that is not the card's memory",
        (Remedy("another --attention-backend, a smaller block or head size, or a newer vLLM", "the limit is the card's",
                "--attention-backend"),),
    ),
    "remote-code": (
        "the model brings its own code, and nobody allowed it to run",
        (Remedy("--trust-remote-code, if you trust its authors", "it runs their Python in your server",
                "--trust-remote-code"),),
    ),
}  # fmt: skip
