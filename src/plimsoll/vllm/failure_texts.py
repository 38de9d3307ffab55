"""The texts that identify a failure (`data/failures.yaml`), and those of its tracebacks (`data/tracebacks.yaml`)."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from plimsoll.findings import Code
from plimsoll.vllm.versions import yaml_table


class Role(StrEnum):
    """The part of a text in the story of a failure."""

    CAUSE = "cause"  # names what went wrong
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed: the traceback shows the step
    STOP = "stop"  # somebody ended it on purpose
    DEATH = "death"  # the end, never the reason
    NOISE = "noise"  # harmless


# Writers whose texts always report an end; all others may go on after a complaint, unless it is one of _ENDS.
_ENDERS = frozenset("kernel nvml shell slurm argparse ray rocm nvcc script systemd terminal hccl uvicorn".split())
_ENDS = frozenset(
    "kv-negative no-gpu-blocks broadcast-wait broadcast-wait-old sampler-warmup weights-too-large nccl-watchdog "
    "client-socket heap-corrupted heap-corrupted-words segfault-caught fatal-python bad-alloc".split()
)


class FailureText(NamedTuple):
    name: str
    needle: str
    role: Role
    code: Code | None = None
    pattern: str | None = None
    speaker: str = "vllm"
    fragment: str | None = None  # of vLLM's source; by default the needle where vLLM speaks
    any_level: bool = False  # counts also in lines that call themselves INFO or WARNING
    says: str = ""  # for people, if the code's own title says too little
    may_go_on: bool = False  # its writer may go on afterwards, unless it is part of an exception


_TRACEBACKS = yaml_table("tracebacks")
STEP_FRAMES = tuple((step, tuple(functions.split())) for step, functions in _TRACEBACKS["steps"].items())
LOGITS_FILES, MULTIMODAL_FILES, COLLECTIVE_FILES, GRAPH_FILES, MODEL_FILES, TRAINER_FILES = (
    tuple(_TRACEBACKS["files"][what].split()) for what in ("logits", "multimodal", "collective", "graph", "model", "trainer")
)
PLACES = tuple(
    (tuple(row["files"].split()), tuple(row.get("exceptions", "").split()), Code(row["code"])) for row in _TRACEBACKS["places"]
)
PLACED = tuple(_TRACEBACKS["records"])
CLIENTS = frozenset(_TRACEBACKS["clients"].split())
ENDERS = frozenset(_TRACEBACKS["enders"].split())
CONSEQUENCES, CONSEQUENCE_WORDS = frozenset(_TRACEBACKS["consequences"].split()), tuple(_TRACEBACKS["consequence_words"])


def _text(name: str, role: str, code: str = "", any_level: str = "", **more: str) -> FailureText:
    speaker = more.get("speaker", "vllm")
    is_end = speaker in _ENDERS or name in _ENDS or (speaker == "cuda" and code.startswith("other."))
    may_go_on = role == Role.CAUSE and not is_end
    return FailureText(
        name, role=Role(role), code=Code(code) if code else None, any_level=bool(any_level), may_go_on=may_go_on, **more
    )


_GROUPS = {name: tuple(_text(**row) for row in rows) for name, rows in yaml_table("failures").items()}
MEMORY, OTHER, LIFE = _GROUPS["memory"], _GROUPS["other"], _GROUPS["life"]
TEXTS = (*MEMORY, *OTHER, *LIFE)
