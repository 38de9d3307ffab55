"""What the device has and who holds it, through NVML: it needs no CUDA context, so it may be asked while a worker starts.

Which of NVML's devices is the worker's: by the device's UUID once torch may be asked for it; before that by
CUDA_VISIBLE_DEVICES, where that is unmistakable. A slice of a device (MIG) is not looked up: NVML's figures would be those
of the whole device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

_HOMES = ("vllm.third_party.pynvml", "pynvml")  # vLLM brings its own copy
SHARES = ("device_memory.by_this_process", "device_memory.by_others")  # unknown together


class DeviceMemory(NamedTuple):
    """Figures in bytes, the device's name, and the reason for each that is unknown."""

    figures: dict[str, Any] | None
    name: str | None
    reasons: dict[str, str]


class Nvml:
    """NVML's view of one CUDA device; opened at the first question, and asked no more once it has failed for good."""

    def __init__(self, index: int, environ: Mapping[str, str] | None = None, module: Any = None) -> None:
        self.index = index
        self.environ = os.environ if environ is None else environ
        self._module = module
        self._is_open = False
        self._handle: Any = None
        self._is_sure = False  # whether the handle was found by UUID
        self._refused: str | None = None

    def memory(self, uuid: str | None, reserved: int | None, pid: int) -> DeviceMemory:
        """The device's memory and this process's part of it; `reserved` is what torch holds of it at least."""
        try:
            handle = self._found(uuid)
            if handle is None:
                return DeviceMemory(None, None, {"device_memory": self._refused or "NVML does not know this device yet"})
            total, free, used = self._amounts(handle)
            own, reason = self._own(handle, reserved, pid)
            name = self._text(self._module.nvmlDeviceGetName(handle))
        except Exception as error:  # NVML's errors share no base with anybody's; a driver may be replaced under us
            return DeviceMemory(None, None, {"device_memory": f"NVML failed: {type(error).__name__}"})
        others = None if own is None else max(0, used - own)
        figures = {"total": total, "free": free, "used": used, "by_this_process": own, "by_others": others, "source": "nvml"}
        reasons = {} if own is not None else dict.fromkeys(SHARES, reason)
        return DeviceMemory(figures, name, reasons)

    def _found(self, uuid: str | None) -> Any:
        if self._refused is not None or (self._handle is not None and (self._is_sure or uuid is None)):
            return None if self._refused else self._handle
        if not self._is_open:
            self._module = self._module or _load()
            if self._module is None:
                self._refused = "NVML is not here"
                return None
            self._module.nvmlInit()
            self._is_open = True
        if uuid is not None:
            self._handle, self._is_sure = self._module.nvmlDeviceGetHandleByUUID(uuid), True
        else:
            self._handle = self._by_environment()
        if self._handle is not None and self._is_sliced(self._handle):
            self._handle, self._refused = None, "the device is cut into slices (MIG); NVML's figures are those of the whole"
        return self._handle

    def _by_environment(self) -> Any:
        """The device by what the environment says; None where that could be another one."""
        nvml = self._module
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
        if entries is not None and self.index >= len(entries):
            return None
        entry = str(self.index) if entries is None else entries[self.index]
        if entry.startswith("MIG-"):
            self._refused = "the device is a slice of one (MIG); NVML's figures are those of the whole"
            return None
        if entry.startswith("GPU-"):
            return nvml.nvmlDeviceGetHandleByUUID(entry)  # also a shortened one is refused by NVML, not mistaken
        if not (entry.isascii() and entry.isdigit()) or int(entry) >= nvml.nvmlDeviceGetCount():
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(nvml.nvmlDeviceGetCount())]
        # CUDA numbers devices by speed unless told otherwise, NVML by their place on the bus: the same if all are alike.
        names = {self._text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
        if len(names) > 1 and self.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        return handles[int(entry)]

    def _is_sliced(self, handle: Any) -> bool:
        try:
            current, _ = self._module.nvmlDeviceGetMigMode(handle)
        except Exception:  # most devices cannot be sliced, and say so with an error
            return False
        return bool(current)

    def _amounts(self, handle: Any) -> tuple[int, int, int]:
        """Total, free and used; what the driver keeps for itself is in neither free nor used, as nvidia-smi has it."""
        nvml = self._module
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except Exception:  # an older driver, or an older copy of the bindings
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(found.total), int(found.free), int(found.used)

    def _own(self, handle: Any, reserved: int | None, pid: int) -> tuple[int | None, str]:
        """This process's part, or None and why."""
        for process in self._module.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid != pid:
                continue
            if process.usedGpuMemory is None:
                return None, "the driver does not say what each process holds"
            if reserved is not None and process.usedGpuMemory < reserved:
                # In a container NVML may count processes from outside, where our number is somebody else's.
                return None, "NVML's process of this number holds less than torch does, so it is another one"
            return int(process.usedGpuMemory), ""
        return None, "NVML lists no process of this number, as in a container with process numbers of its own"

    @staticmethod
    def _text(value: Any) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def by_cuda(free: int, total: int) -> dict[str, Any]:
    """The same figures where only CUDA was asked."""
    used = total - free
    return {"total": total, "free": free, "used": used, "by_this_process": None, "by_others": None, "source": "cuda"}


def _load() -> Any:
    for home in _HOMES:
        try:
            return importlib.import_module(home)
        except Exception:  # noqa: S112 - missing, or broken in whatever way: the next one
            continue
    return None
