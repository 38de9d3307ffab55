"""A vLLM general plugin: dummy weights that are random but not small, so that every token depends on all before it.

With vLLM's own dummy weights a greedy answer repeats one token whatever the prompt is, and a wrong KV cache would not show.
Every parameter gets a seed of its own, in the order in which the model lists them: two servers of one model are equal. As with
the lab's other plugins, this folder is a whole distribution: PYTHONPATH and VLLM_PLUGINS are enough.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

SEED = 7
GAIN = 2.0
NAME = "initialize_single_dummy_weight"
LOADER = "vllm.model_executor.model_loader"


def register() -> None:
    """Take the place of vLLM's filling of one parameter; called once in each of its processes, maybe more often."""
    utils: Any = importlib.import_module(f"{LOADER}.weight_utils")
    loader: Any = importlib.import_module(f"{LOADER}.dummy_loader")
    original = getattr(utils, NAME)
    if getattr(original, "is_lively", False):
        return
    fill = lively(original)
    setattr(utils, NAME, fill)
    setattr(loader, NAME, fill)


def lively(original: Callable[..., None]) -> Callable[..., None]:
    """A filler that fills each parameter once; what is no plain number of 16 bits or more is left to the original."""
    torch: Any = importlib.import_module("torch")
    seen: dict[tuple[int, int], int] = {}

    def fill(param: Any, *args: Any, **kwargs: Any) -> None:
        if param.device.type == "meta" or not torch.is_floating_point(param) or torch.finfo(param.dtype).bits < 16:
            original(param, *args, **kwargs)
            return
        key = (param.data_ptr(), param.numel())
        if key in seen and param.numel():
            return  # vLLM lists a parameter once for every module around it
        seen[key] = number = len(seen)
        with torch.no_grad():
            if param.dim() < 2:
                param.data.fill_(1.0)  # a norm's weights, or a bias
                return
            generator = torch.Generator(device=param.data.device).manual_seed(SEED + number)
            inputs = math.prod(param.shape[1:])
            param.data.normal_(0.0, GAIN / math.sqrt(inputs), generator=generator)

    fill.is_lively = True  # type: ignore[attr-defined]
    return fill
