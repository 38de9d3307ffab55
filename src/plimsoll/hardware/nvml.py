"""The GPUs of this machine, as NVIDIA's management library sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

from plimsoll.errors import BadInput, WorldFailed


class NvmlCard(NamedTuple):
    """One card: its product name, and the memory that others hold on it now."""

    name: str
    total_bytes: int  # NVML's figure; vLLM sees a little less
    used_bytes: int


def read_cards(library: Any = None) -> list[NvmlCard]:
    """Every card, in NVML's order; the library is an argument for tests. One line says what is missing."""
    nvml = library
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            raise BadInput("which card? --gpu H100, or `pip install nvidia-ml-py` to read this machine's") from None
        nvml = pynvml
    cards = []
    try:
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
                shown = name.decode() if isinstance(name, bytes) else str(name)
                cards.append(NvmlCard(shown, int(memory.total), int(memory.used)))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise WorldFailed(f"NVML does not answer ({error}); name the card with --gpu") from None
    return cards
