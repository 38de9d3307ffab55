"""A vLLM general plugin: while a flag file exists, every engine step runs out of memory.

The engine then dies the way it dies in production, since nothing but the first exception is ours. This folder is a
whole distribution as it stands (the .dist-info beside this file declares the entry point), so putting it on PYTHONPATH
and naming it in VLLM_PLUGINS is enough: nothing is installed, and an engine started without it cannot know it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

FLAG_FILE = "PLIMSOLL_LAB_OOM_FLAG"  # the environment variable that names the flag file
# The words of a real one, so that what reads the log meets what it will meet in production.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.31 GiB is "
    "free. Including non-PyTorch memory, this process has 77.79 GiB memory in use. Of the allocated memory 74.02 GiB "
    "is allocated by PyTorch, and 1.12 GiB is reserved by PyTorch but unallocated."
)


def register() -> None:
    """Wrap the model runner's step; called by vLLM once in each of its processes, maybe more often."""
    torch = importlib.import_module("torch")
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    flag = os.environ[FLAG_FILE]
    step = runner.execute_model
    if getattr(step, "fails_on_demand", False):
        return

    def step_or_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.exists(flag):  # noqa: PTH110 - once per engine step: the cheapest question there is
            raise torch.OutOfMemoryError(MESSAGE)
        return step(self, *args, **kwargs)

    step_or_fail.fails_on_demand = True  # type: ignore[attr-defined]
    runner.execute_model = step_or_fail
