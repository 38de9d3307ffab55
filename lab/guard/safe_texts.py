"""The texts that a vLLM release logs and raises, and that guard's safe_records.txt does not know yet: to be read, then added.

    python -m lab.guard.safe_texts site-packages/vllm

Of files that log nothing of a request but its id, and errors of the engine's inner parts. A field that may quote somebody
becomes {x}, which is always hidden; read the others before you add a text.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import plimsoll.guard.daemon.safe_log as reader

KNOWN = Path(reader.__file__).with_name("safe_records.txt")
FILES = frozenset("""
    __init__ abstract api_server api_utils arg_utils argparse_utils async_llm auto_awq backends base base_loader
    block_pool cache compilation config contain core core_client cpu cpu_model_runner cpu_worker cuda cudagraph_utils
    cumem cutedsl_warmup decorators default_loader door_vllm entry fa_utils factories faults flash_attn fp8 fused_moe
    gate gate_control gpu_model_runner gpu_worker jit_monitor kernel kv_cache kv_cache_utils launcher llm_engine loader
    loggers model model_runner monitor multiproc_executor mxfp4 ompmultiprocessing parallel_state punica_selector
    ray_distributed_executor ray_utils registry repo_utils sampler scheduler shm_broadcast sleep_mode_backend
    system_utils tick topk_topp_sampler torch_utils unquantized utils vllm weight_utils worker_base
""".split())  # fmt: skip
INNER = ("v1/worker/", "v1/core/", "v1/executor/", "v1/engine/core", "v1/engine/utils", "platforms/", "device_allocator/",
         "distributed/parallel_state", "distributed/device_communicators/", "v1/sample/", "utils/mem")  # fmt: skip
LEVELS = frozenset(("info", "warning", "error", "critical", "exception", "info_once", "warning_once", "error_once"))
LOGGERS = ("logger", "self.logger", "LOG")
FIELD = re.compile(r"%(?:\(\w+\))?[-+ 0#]*\d*(?:\.\d+)?([sdifgrxeGX%])")
QUOTES = re.compile(
    r"^(?:e|ex|exc|err|error|reason|why|msg|message|text|output|stop|body)$|repr\(|str\(e|rompt|content|template"
)
SHORTEST = 8


def fields(text: str, values: list[str]) -> str:
    """A format of logging, with its fields by type."""
    left = iter(values)

    def field(found: re.Match[str]) -> str:
        if found[1] == "%":
            return "%"
        value = next(left, "?")
        return "{n}" if found[1] in "difgeGxX" else "{x}" if QUOTES.search(value) else "{}"

    return FIELD.sub(field, text)


def text_of(call: ast.Call) -> str:
    """What the call says, on its first line; "" where that is not in the call itself."""
    first, values = call.args[0], [ast.unparse(value) for value in call.args[1:]]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        said = "" if "{" in first.value else fields(first.value, values)
    elif isinstance(first, ast.JoinedStr):
        said = "".join(
            str(part.value) if isinstance(part, ast.Constant)
            else "{x}" if isinstance(part, ast.FormattedValue) and QUOTES.search(ast.unparse(part.value)) else "{}"
            for part in first.values
        )  # fmt: skip
    else:
        said = ""
    said = re.sub(r"(?:\{\w?\}){2,}", "{x}", said.strip().partition("\n")[0].rstrip())
    return said if len(said.partition("{")[0].strip()) >= SHORTEST else ""


def texts(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        is_inner = file.relative_to(package).as_posix().startswith(INNER)
        if file.stem not in FILES and not is_inner:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            call = node.exc if is_inner and isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            is_log = (
                isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS and ast.unparse(call.func.value) in LOGGERS
            )
            if call is not node or (is_log and file.stem in FILES):
                yield text_of(call)


def main(words: list[str]) -> int:
    known = set(KNOWN.read_text(encoding="utf-8").splitlines()) | {""}
    print("\n".join(sorted(set(texts(Path(words[0]))) - known)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
