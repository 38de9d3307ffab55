"""The flags a server was started with, from the line in which vLLM prints them; secrets are hidden before anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice

from plimsoll.domain.redaction import REDACTED, redact_value

LONGEST_NAME = 64
LONGEST_VALUE = 400
MOST_FLAGS = 200
# Of the first engine's `Namespace(...)`, which prints every argument, these tell something; the rest are defaults.
_TELLING = frozenset({
    "model", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "quantization", "dtype", "kv_cache_dtype", "enforce_eager", "block_size",
    "swap_space", "cpu_offload_gb", "enable_prefix_caching", "enable_chunked_prefill", "enable_lora", "max_loras",
    "max_lora_rank", "speculative_model", "num_speculative_tokens", "limit_mm_per_prompt", "num_scheduler_steps",
    "max_logprobs", "trust_remote_code", "load_format", "preemption_mode", "distributed_executor_backend",
})  # fmt: skip
# What the engine calls them, and the flag that sets them.
_IN_FORCE = {
    "model": "model", "tensor_parallel_size": "tensor_parallel_size", "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size", "max_seq_len": "max_model_len", "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype", "enforce_eager": "enforce_eager",
}  # fmt: skip
# Where it listens and who may ask: nothing a plan needs.
_NOT_PLANNED = frozenset({
    "model", "model_tag", "host", "port", "served_model_name", "api_server_count", "api_key", "middleware",
})  # fmt: skip
_MARKS = ("non-default args: {", "args: Namespace(", "with config: ")


@lru_cache(maxsize=8)  # every worker prints the same line
def flags_of(text: str) -> Mapping[str, str]:
    """Name to value as printed, from one line; empty where the line is another one."""
    for mark in _MARKS:
        at = text.find(mark)
        if at < 0:
            continue
        inner = text[at + len(mark) :]
        pairs: Iterable[tuple[str, str]]
        if mark.startswith("non-default"):
            pairs = ((name.strip("'\""), value) for name, value in _split(inner, ":"))
        elif mark.startswith("args"):
            pairs = ((name, value) for name, value in _split(inner, "=") if name in _TELLING and value != "None")
        else:
            pairs = _of_config(inner)
        return {name: _shown(name, value) for name, value in islice(pairs, MOST_FLAGS) if _is_name(name)}
    return {}


def _is_name(name: str) -> bool:
    return len(name) <= LONGEST_NAME and name.isidentifier()


def _of_config(inner: str) -> Iterator[tuple[str, str]]:
    """`Initializing an LLM engine with config: model='...', max_seq_len=8192, ...`: what was in force, not what was asked."""
    for name, value in _split(inner, "="):
        if name in _IN_FORCE and value not in ("None", "auto", "False"):
            yield _IN_FORCE[name], value


def _split(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The pairs at the outermost level; quotes and brackets inside a value are kept together."""
    depth, quote, start = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>" and depth:
            depth -= 1
        elif (letter == "," and depth == 0) or letter in ")]}":
            name, found, value = text[start:at].partition(separator)
            if found and name.strip():
                yield name.strip(), value.strip()
            start = at + 1
            if letter != ",":
                return
    name, found, value = text[start:].partition(separator)
    if found and name.strip() and not quote and depth == 0:
        yield name.strip(), value.strip()


def _shown(name: str, value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    value = redact_value(name, value)
    return value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "..."


def without_values(text: str) -> str:
    """What a parser refused, flags only: what was meant as a secret's value stands behind a flag that was mistyped."""
    head, mark, words = text.partition("unrecognized arguments:")
    flags = [word.partition("=")[0] + (" ..." if "=" in word else "") for word in words.split() if word.startswith("-")]
    return f"{head}{mark} {' '.join(flags) or '...'}" if mark else text


def command_words(flags: Mapping[str, str]) -> list[str] | None:
    """The flags as a command `plan` understands; None where no model is named. Values that are no plain word are left out."""
    model = flags.get("model") or flags.get("model_tag")
    if not model or model.startswith("-") or not model.isprintable() or REDACTED in model:
        return None
    words = ["vllm", "serve", model]
    for name, value in flags.items():
        if name in _NOT_PLANNED:
            continue
        flag = "--" + name.replace("_", "-")
        if value == "True":
            words.append(flag)
        elif value == "False":
            words.append("--no-" + name.replace("_", "-"))
        elif value not in ("None", "") and not any(letter in value for letter in "{[<(\n\0") and REDACTED not in value:
            words += [flag, value]
    return words
