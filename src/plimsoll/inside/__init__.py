"""The part of plimsoll in vLLM's own processes: the figures, the gate and the recording that vLLM lacks.

    vllm serve MODEL --worker-extension-cls plimsoll.inside.Probe --middleware plimsoll.inside.Gate

vLLM reads the two names from this package; each is imported at that moment, in that process. Nothing here needs more than
vLLM brings, and importing it touches neither a device nor the network.
"""

from __future__ import annotations

from typing import Any

_HOMES = {"Probe": "plimsoll.inside.probe", "Gate": "plimsoll.inside.gate"}

__all__ = ["Gate", "Probe"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"plimsoll.inside has no {name}; it has {', '.join(_HOMES)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
