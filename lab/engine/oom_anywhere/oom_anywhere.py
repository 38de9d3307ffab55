"""A vLLM general plugin: one chosen function fails as it would on a full GPU, everything around it is vLLM's own.

PLIMSOLL_LAB_FAIL holds JSON: `at` ("module:Class.function", the function that fails), `within` (it fails only while a
function of this name is on the stack), `text` and `kind` (the error: see KINDS), and, where wanted, `flag` (it fails only
while this file exists) and `rank` (it fails in this worker alone). As with `oom_on_demand`, this folder is a whole
distribution: PYTHONPATH and VLLM_PLUGINS are enough.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import FrameType
from typing import Any

SETTING = "PLIMSOLL_LAB_FAIL"
# What torch raises for each kind; AcceleratorError is what a plain "CUDA error: ..." has been since torch 2.8.
KINDS = {"oom": "OutOfMemoryError", "cuda": "AcceleratorError", "nccl": "distributed.DistBackendError"}


def register() -> None:
    """Wrap the chosen function; called by vLLM once in each of its processes, maybe more often."""
    fault: dict[str, Any] = json.loads(os.environ[SETTING])
    module, _, path = fault["at"].partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    real = getattr(owner, name)
    if getattr(real, "fails_on_demand", False):
        return

    def fail_or_call(*args: Any, **kwargs: Any) -> Any:
        if is_due(fault, sys._getframe(1)):  # noqa: SLF001 - the only way to see who calls
            raise error_of(fault)
        return real(*args, **kwargs)

    fail_or_call.fails_on_demand = True  # type: ignore[attr-defined]
    setattr(owner, name, fail_or_call)


def is_due(fault: dict[str, Any], frame: FrameType | None) -> bool:
    """Whether this call is the one to fail."""
    flag, rank = fault.get("flag"), fault.get("rank")
    if flag is not None and not os.path.exists(flag):  # noqa: PTH110 - once per call: the cheapest question there is
        return False
    while frame is not None and frame.f_code.co_name != fault["within"]:
        frame = frame.f_back
    return frame is not None and (rank is None or rank == rank_here())


def rank_here() -> int:
    """The rank of this worker in its group."""
    rank: int = importlib.import_module("torch.distributed").get_rank()
    return rank


def error_of(fault: dict[str, Any]) -> BaseException:
    """The error as torch would raise it."""
    if fault["kind"] == "runtime":
        return RuntimeError(fault["text"])
    made: Any = importlib.import_module("torch")
    for part in KINDS[fault["kind"]].split("."):
        made = getattr(made, part)
    error: BaseException = made(fault["text"])
    return error
