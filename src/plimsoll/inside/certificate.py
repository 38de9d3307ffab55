"""The certificate's table, as `plimsoll plan --certify --table FILE` writes it: read with limits, and held against this engine.

The table names what memory is left beside weights, KV cache, graphs and the worst plain step, and what each kind of special
request takes of it. A table of another release, model or batch size says nothing about this server and is not used.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SCHEMA = "plimsoll.certificate/1"
LARGEST_FILE = 1 << 20
LARGEST_NUMBER = 2.0**62  # what a shared page can hold
MOST_KINDS = 64
SCOPES = ("step", "process")
# Where vLLM keeps what a table may assume. A name that is not here is of the card or the allocator: nothing to compare with.
HOMES = {
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "max_model_len": ("model_config", "max_model_len"),
    "max_logprobs": ("model_config", "max_logprobs"),
    "gpu_memory_utilization": ("cache_config", "gpu_memory_utilization"),
    "block_size": ("cache_config", "block_size"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "max_loras": ("lora_config", "max_loras"),
    "max_lora_rank": ("lora_config", "max_lora_rank"),
    "enforce_eager": ("model_config", "enforce_eager"),
    "v2_model_runner": ("", "use_v2_model_runner"),  # of the whole config
}
NEEDED = ("max_num_batched_tokens", "max_num_seqs")


class BadTable(Exception):
    """The table cannot be used; the message says why."""


class Kind(NamedTuple):
    """One kind of request, and what its phase of a step takes of the spare memory. Phases follow each other: each has all."""

    kind: str
    unit: str
    fixed_bytes: float
    bytes_per_unit: float
    most_units: float  # that one step can hold
    scope: str  # "step": what requests of one step need together; "process": what one needs when it comes first
    is_open: bool  # whether any request of this kind can exceed the spare memory

    def cost(self, units: float) -> float:
        """Bytes of so many units in one step, whoever asks for them."""
        return self.fixed_bytes + self.bytes_per_unit * min(units, self.most_units) if units > 0 else 0.0


class Certificate(NamedTuple):
    """What the door reads of a table."""

    vllm: str
    model: str
    spare_bytes: float
    assumes: Mapping[str, Any]
    kinds: tuple[Kind, ...]


def read_certificate(path: str) -> Certificate:
    """The table in this file; BadTable says in one sentence why it is not one."""
    if not path:
        raise BadTable("PLIMSOLL_CERTIFICATE is not set")
    try:
        text = _text(path)
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadTable(f"{path} is not JSON") from None
    try:
        return _certificate(found)
    except BadTable as problem:
        raise BadTable(f"{path}: {problem}") from None


def _text(path: str) -> bytes:
    # Not blocking: a pipe that nobody writes to would hold up the server's start.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise BadTable(f"{path} is not a plain file")
        text = b""
        while len(text) <= LARGEST_FILE and (part := os.read(file, LARGEST_FILE + 1 - len(text))):
            text += part
    finally:
        os.close(file)
    if len(text) > LARGEST_FILE:
        raise BadTable(f"{path} is larger than {LARGEST_FILE} bytes")
    return text


def _certificate(found: Any) -> Certificate:
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BadTable(f"its schema is not {SCHEMA}")
    rows, assumes = found.get("kinds"), found.get("assumes")
    if not isinstance(rows, list) or len(rows) > MOST_KINDS:
        raise BadTable(f"kinds is not a list of at most {MOST_KINDS}")
    if not isinstance(assumes, dict):
        raise BadTable("assumes is not an object")
    for name in NEEDED:
        _number(assumes, name)
    kinds = tuple(_kind(row) for row in rows)
    if len({kind.kind for kind in kinds}) != len(kinds):
        raise BadTable("a kind stands in it twice")
    spare = _number(found, "spare_bytes", least=-LARGEST_NUMBER)  # below 0 where not even a plain step is covered
    return Certificate(_word(found, "vllm"), _word(found, "model"), spare, assumes, kinds)


def _kind(row: Any) -> Kind:
    if not isinstance(row, dict):
        raise BadTable("a kind is not an object")
    kind = Kind(
        _word(row, "kind"),
        _word(row, "unit"),
        _number(row, "fixed_bytes"),
        _number(row, "bytes_per_unit"),
        _number(row, "most_units"),
        _word(row, "scope"),
        is_open=row.get("smallest", 1) is not None,
    )
    if kind.scope not in SCOPES:
        raise BadTable(f"the scope of {kind.kind} is neither step nor process")
    return kind


def _word(found: Mapping[str, Any], name: str) -> str:
    word = found.get(name)
    if not isinstance(word, str) or not word or len(word) > 1000:
        raise BadTable(f"{name} is not a word")
    return word


def _number(found: Mapping[str, Any], name: str, least: float = 0.0) -> float:
    number = found.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= LARGEST_NUMBER:
        raise BadTable(f"{name} is not a number of bytes or units")  # NaN is within no bounds
    return float(number)


def why_foreign(table: Certificate, vllm_version: str, config: Any) -> str:
    """Why the table was made for another engine than the one with this config; empty where it was made for this one."""
    if _release(vllm_version) != _release(table.vllm):
        return f"the certificate is for vLLM {table.vllm[:40]}, and this is {vllm_version}"
    model_config = getattr(config, "model_config", None)
    names = [getattr(model_config, name, None) for name in ("model", "model_weights")]
    if not any(isinstance(name, str) and name and _is_same_model(name, table.model) for name in names):
        return f"the certificate is for the model {table.model[:80]}, and this is {names[0]}"
    for name, (home, attribute) in HOMES.items():
        if name not in table.assumes:
            continue
        part = getattr(config, home, None) if home else config
        assumed, real = table.assumes[name], getattr(part, attribute, None)
        if not _is_same(assumed, real):
            return f"the certificate assumes {name} {str(assumed)[:40]}, and here it is {str(real)[:40]}"
    return ""


def _is_same(assumed: Any, real: Any) -> bool:
    if isinstance(assumed, float) and isinstance(real, int | float):
        return math.isclose(assumed, real, rel_tol=1e-6)
    return bool(assumed == real)


def _release(version: str) -> str:
    return version.partition("+")[0].removeprefix("v")


def _is_same_model(real: str, named: str) -> bool:
    """The same name, or the same folder or repository at the end of a path: vLLM may have fetched it to a folder of its own."""
    ends: list[Callable[[str], str]] = [
        lambda name: name.rstrip("/"),
        _repository,
        lambda name: _repository(name).rpartition("/")[2],
    ]
    return any(end(real) == end(named) for end in ends)


def _repository(name: str) -> str:
    """`ORG/NAME` of a folder in the Hugging Face cache; any other name as it is."""
    cached = [part for part in name.split("/") if part.startswith("models--")]
    return "/".join(cached[-1].split("--")[1:]) if cached else name.rstrip("/")
