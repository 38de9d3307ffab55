"""A vLLM-like engine without a GPU. `StandIn` has a clock of its own, for tests: a day of it takes seconds.

from plimsoll.standin import stand_in

engine = stand_in("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192", gpu="L4", faults=["wedge@60s"])
engine.send([0.0, 0.5, 1.0], prompts=[500, 500, 500], outputs=[100, 100, 100])
engine.until(60.0)
print(engine.page())
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from plimsoll.errors import BadInput
from plimsoll.simulate.options import StandinCommandOptions
from plimsoll.standin.clocked import EngineDown, StandIn
from plimsoll.standin.launch import read_options

__all__ = ["EngineDown", "StandIn", "stand_in"]


def stand_in(command: str = "", *, gpu: str = "L4", vllm: str = "", faults: Sequence[str] = ()) -> StandIn:
    """Returns the engine that `plimsoll standin` would start for this command, on a clock of its own."""
    options = StandinCommandOptions(gpu=gpu, vllm=vllm or None, rest=tuple(shlex.split(command)))
    launch = read_options(options, os.environ).launches[0]
    if launch.failure is not None:
        raise BadInput(f"vLLM would not start: {launch.failure.message}")
    return StandIn(launch.config, faults)
