"""Shows of an engine's log only what is known to be no user's text: the fields of vLLM's own records, and known messages.

A record's process, level, time and place in the source are always shown; its message where that file logs nothing that a user
wrote; an exception's kind always, its message where it begins as one that is known here. Frames of a traceback are shown, and
lines of the system, the driver and the collectives that are known. Everything else is hidden: a line says how much of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from plimsoll.guard.adapters.own_process import NEW_LIFE
from plimsoll.redaction import HIDDEN

SAFE_FILES = frozenset(
    "__init__ abstract api_server api_utils arg_utils argparse_utils async_llm auto_awq backends base base_loader"
    " block_pool cache compilation config contain core core_client cpu cpu_model_runner cpu_worker cuda cudagraph_utils"
    " cumem cutedsl_warmup decorators default_loader door_vllm entry fa_utils factories faults flash_attn fp8 fused_moe gate"
    " gate_control gpu_model_runner gpu_worker jit_monitor kernel kv_cache kv_cache_utils launcher llm_engine loader loggers"
    " model model_runner monitor multiproc_executor mxfp4 ompmultiprocessing parallel_state punica_selector"
    " ray_distributed_executor ray_utils registry repo_utils sampler scheduler shm_broadcast sleep_mode_backend system_utils"
    " tick topk_topp_sampler torch_utils unquantized utils vllm weight_utils worker_base".split()
)
"""Files of vLLM, and of plimsoll inside it, that log sizes, settings and states, and nothing of a request but its id."""

_RECORD = re.compile(
    r"(?P<head>(?:\([A-Za-z][^()\n]{0,80}pid=\d{1,10}[^()\n]{0,60}\) ?)?"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?(?P<file>[\w./]{1,200})\.py:\d{1,6}\] ?)(?P<text>.*)",
    re.DOTALL,
)
_WRAPPING = re.compile(
    r"(?:\x1b\[[0-9;]{0,16}m|<\d{1,3}>|\[\d{4}-\d\d-\d\d[T ][\d:.,Z+\-]{8,24}\] ?|\[pod/[^\]\s]{1,200}\] ?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,20}(?: (?:stdout|stderr) [FP])? "
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [^\s:]{1,80}: ?|[A-Za-z0-9][\w.\-]{0,80} {0,40}\| ?){1,4}"
)
_PROCESS = re.compile(r"\([A-Za-z][^()\n]{0,80}pid=\d{1,10}[^()\n]{0,60}\) ?|\[rank\d{1,4}\]: ?")
_FRAME = re.compile(r'\s*File "[^"\n]{1,400}", line \d{1,7}(?:, in [\w.<>]{1,120})?\s*')
_CARET = re.compile(r"\s*[\^~]+\s*")
_STRUCTURE = re.compile(
    r"\s*(?:Traceback \(most recent call last\):|(?:Current )?[Tt]hread 0x[0-9a-f]+[^\n]{0,80}"
    r"|Stack \(most recent call first\):"
    r"|During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:|)\s*"
)
_EXCEPTION = re.compile(
    r"\s*(?P<kind>(?:[A-Za-z_]\w*\.){0,8}(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Dead|NotFound|Warning))"
    r"(?:: (?P<text>.*))?\s*",
    re.DOTALL,
)
_KNOWN_MESSAGES = re.compile(
    r"(?:CUDA out of memory|HIP out of memory|Tried to allocate|CUDA [eE]rror: |HIP error: |NCCL [eE]rror|cuBLAS|CUDNN|cuDNN"
    r"|out of memory|[Cc]annot allocate memory|[Uu]nable to allocate|DefaultCPUAllocator|not enough memory"
    r"|No available memory for the cache blocks|To serve at least one request|The model's max seq len|Free memory on device"
    r"|Error in memory profiling|Initial free memory|Engine core initialization failed|EngineCore encountered an issue"
    r"|EngineCore\b|Engine process|Engine loop|Worker failed with error 'CUDA|Worker proc|WorkerProc|Executor failed"
    r"|RPC call to|Failed core proc|\[Errno \d{1,4}\]|[Nn]o such file|[Pp]ermission denied|[Aa]ddress already in use"
    r"|[Nn]o space left|[Cc]onnection (?:refused|reset|aborted)|[Tt]imed out|Bfloat16 is only supported|device-side assert"
    r"|No module named|NVML_SUCCESS|Call to \w{1,40} method failed: CUDA|an illegal memory access|No CUDA GPUs"
    r"|Found no NVIDIA driver|cancelled)"
)
_SYSTEM = re.compile(
    r"Segmentation fault|Bus error|Aborted|Killed|Terminated|Illegal instruction|Floating point exception|terminate called"
    r"|\*\*\* Signal|!!!!!!! |Fatal Python error: [\w ]{1,60}$|Extension modules: |resource_tracker: |.{0,40}core dumped\)?$"
    r"|\S{1,80}:\d+:\d+ \[\d+\] NCCL |NCCL version |(?:kernel: )?(?:\[ *\d+\.\d+\] )?(?:NVRM: |Out of memory: Killed process "
    r"|oom-kill:|Memory cgroup out of memory|[\w-]{1,40}\[\d+\]: segfault at )"
    r"|CUDA Error: |INFO: {5}(?:Started|Waiting|Application|Uvicorn|Shutting|Finished|Stopping)"
    r"|(?:vllm|usage|vllm serve): (?:error: )?(?:unrecognized arguments|argument |the following|invalid|error|vllm )"
    r"|\[plimsoll left out about [0-9,]+ bytes here\]|plimsoll: "
)
_BANNER = re.compile(r"[^\w\n]{0,80}(?:[█▀▄▌▐]|version \S{1,40}$|model   \S{1,200}$)")
_PROGRESS = re.compile(
    r"\s*(?:(?:Loading|Capturing|Compiling|Downloading|Fetching|Processed|Rendering)[\w ().,=/-]{0,80}:)?\s*\d{1,3}%(?:\||\s)"
)
_ACCESS = re.compile(r'(INFO: {5}\S{1,80} - "[A-Z]{3,8} /[^\s?"]{0,200})(\?[^\s"]*)?( HTTP/[\d.]{1,3}" \d{3}[ \w]{0,40})\s*')
_QUOTED = re.compile(r"'(?:[^'\\\n]|\\.){0,4000}'|\"(?:[^\"\\\n]|\\.){0,4000}\"|`[^`\n]{0,4000}`")
_SETTINGS = ("api_utils", "arg_utils", "utils", "api_server", "vllm", "core", "config", "model")  # the operator's own words
_MARK = NEW_LIFE.decode().strip()
_INTRODUCES = ("api_server", "api_utils", "utils")  # which print vLLM's name and release when a process begins
_INTRODUCTION = re.compile(r"[█▀▄] {1,4}version |vLLM (?:API )?server version ")
_JSON_TIMES = ("time", "timestamp", "asctime", "ts")
_UP = re.compile(r"Application startup complete|Uvicorn running|Started server process|\] (?:Received|Added) request| HTTP/1")


def safe_lines(lines: Iterable[str], begun: str = "") -> Iterator[str]:
    """The lines of a log, with whatever is not known to be safe hidden; `begun` stands for vLLM's dump of its last step."""
    hidden, is_frame, ending = 0, False, ""  # `ending`: the head of a record whose exception may go on in the next lines
    is_up = True  # it may have had requests; a process that has not finished its start has had none
    for raw in lines:
        line = raw.rstrip("\r\n")
        wrap = _WRAPPING.match(line)
        head, bare = (wrap[0], line[wrap.end() :]) if wrap is not None else ("", line)
        if bare.startswith("{") and (plain := _from_json(bare)) is not None:
            bare = plain
        record = _RECORD.match(bare)
        if record is not None:
            own, text, file = record["head"], record["text"], record["file"].rpartition("/")[2]
        else:
            process = _PROCESS.match(bare)
            own, text, file = (process[0], bare[process.end() :], "") if process is not None else ("", bare, "")
        shown, goes_on = _shown(text, file, begun, is_frame=is_frame, is_after=bool(ending) and ending == (own or "-"))
        if text == _MARK or (file in _INTRODUCES and _INTRODUCTION.search(text)):
            is_up = False
        is_up = is_up or _UP.search(bare) is not None
        if not is_up:
            shown, goes_on = text, False
        is_frame = _FRAME.fullmatch(text) is not None
        ending = (own or "-") if goes_on else ""
        if shown is None and record is None:
            hidden += 1
            continue
        if hidden:
            yield f"[{hidden} lines hidden: not known to be free of users' text]\n"
            hidden = 0
        yield f"{head}{own}{HIDDEN if shown is None else shown}\n"
    if hidden:
        yield f"[{hidden} lines hidden: not known to be free of users' text]\n"


def _shown(text: str, file: str, begun: str, *, is_frame: bool, is_after: bool) -> tuple[str | None, bool]:
    """What may be shown of one line, None for nothing; and whether the next lines may be the rest of an exception's message."""
    if _STRUCTURE.fullmatch(text) or _FRAME.fullmatch(text) or _CARET.fullmatch(text) or text == _MARK:
        return text, False
    if is_frame and text.startswith("    "):
        return _plain(text), False  # the line of source that the frame names
    if (found := _EXCEPTION.fullmatch(text)) is not None:
        message = found["text"]
        is_known = message is None or _KNOWN_MESSAGES.match(message) is not None
        return f"{found['kind']}" + ("" if message is None else f": {_plain(message) if is_known else HIDDEN}"), True
    if is_after:
        return None, True
    if file == "dump_input":
        what = text.partition(":")[0] if text.startswith("Dumping ") else ""
        return (f"{what}: {begun or HIDDEN}" if "output" in what else f"{what}: {HIDDEN}") if what else None, False
    if file in SAFE_FILES:
        return (text if file in _SETTINGS else _plain(text)), False
    if file:
        return None, False
    if (access := _ACCESS.fullmatch(text)) is not None:
        return f"{access[1]}{'?' + HIDDEN if access[2] else ''}{access[3]}", False
    if _SYSTEM.match(text) or _BANNER.match(text) or _PROGRESS.match(text):
        return _plain(text), False
    return None, False


def _plain(text: str) -> str:
    """The text with quotations hidden that are more than a name."""
    return _QUOTED.sub(_identifier, text)


def _identifier(quoted: re.Match[str]) -> str:
    inner = quoted[0][1:-1]
    is_name = re.fullmatch(r"[\w./:+@%=,*-]{1,120}", inner) is not None
    return quoted[0] if is_name or inner.startswith(("CUDA ", "HIP ")) else quoted[0][0] + HIDDEN + quoted[0][-1]


def _from_json(line: str) -> str | None:
    """A structured record as vLLM would print it, or docker's line; its other fields are an application's own."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    text = next((found[key] for key in ("log", "message", "msg", "MESSAGE", "text") if isinstance(found.get(key), str)), "")
    name = str(found.get("name", found.get("logger", "")))
    if _RECORD.match(text):
        return text.rstrip("\n")
    if not name.startswith("vllm") and str(found.get("filename", "")).removesuffix(".py") not in SAFE_FILES:
        return text.rstrip("\n") if set(found) <= {"log", "stream", "time", "attrs"} else ""
    level = str(found.get("levelname", found.get("level", found.get("severity", "INFO")))).upper()
    level = level if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") else "INFO"
    stamp = re.search(r"(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)", str(next((found[key] for key in _JSON_TIMES if key in found), "")))
    when = f"{stamp[1]} {stamp[2]}" if stamp is not None else "00-00 00:00:00"
    file = str(found.get("filename", "")) or f"{name.rpartition('.')[2]}.py"
    number = found.get("lineno")
    return f"{level} {when} [{file}:{number if isinstance(number, int) else 0}] {text}"
