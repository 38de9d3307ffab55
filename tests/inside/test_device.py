"""NVML's view of the worker's device, through a stand-in of NVML's Python bindings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.sampler import Nvml, by_cuda

GIB = 1 << 30
PID = 77
UUIDS = ("GPU-aa", "GPU-bb", "GPU-cc")


class Bindings:
    """A machine of three devices, on each a process of ours and one of others; errors as NVML's bindings raise them."""

    nvmlMemory_v2 = 2  # noqa: N815 - the name that NVML has

    def __init__(self, names: tuple[str, ...] = ("H200",) * 3, *, is_old: bool = False, sliced: bool = False) -> None:
        self.names, self.is_old, self.sliced = names, is_old, sliced
        self.processes = [SimpleNamespace(pid=PID, usedGpuMemory=60 * GIB), SimpleNamespace(pid=9, usedGpuMemory=20 * GIB)]
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return UUIDS.index(uuid)

    def nvmlDeviceGetHandleByIndex(self, place: int) -> int:  # noqa: N802
        """One by its place on the bus."""
        return place

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        """Older bindings hand out bytes."""
        return f"{self.names[handle]} {handle}".encode() if len(set(self.names)) > 1 else self.names[handle].encode()

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if not self.sliced:
            raise RuntimeError(f"device {handle}: not supported")
        return 1, 1

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        """With the second version the driver's own part is apart."""
        if version is not None and self.is_old:
            raise RuntimeError("function not found")
        own = 1 if version == 2 else 0
        return SimpleNamespace(total=140 * GIB + handle, free=50 * GIB, used=(90 - own) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        assert handle in range(3)
        return self.processes


def device_of(found: Any) -> int:
    """Which device figures are of: each has a total of its own."""
    assert found.figures is not None, found.reasons
    total: int = found.figures["total"]
    return total - 140 * GIB


def test_the_device_is_found_by_its_uuid() -> None:
    """Used, free, ours and others', the driver's own part left out as nvidia-smi does; NVML is opened once."""
    bindings = Bindings()
    nvml = Nvml(0, {}, bindings)
    for _ in range(2):
        found = nvml.memory("GPU-bb", 50 * GIB, PID)
    assert device_of(found) == 1
    assert found.figures == {
        "total": 140 * GIB + 1, "free": 50 * GIB, "used": 89 * GIB, "by_this_process": 60 * GIB, "by_others": 29 * GIB,
        "source": "nvml",
    }  # fmt: skip
    assert (found.name, found.reasons, bindings.opened) == ("H200", {}, 1)


def test_an_older_driver_is_asked_in_the_older_way() -> None:
    """Its used bytes include the driver's own part."""
    found = Nvml(0, {}, Bindings(is_old=True)).memory("GPU-aa", None, PID)
    assert found.figures is not None
    assert found.figures["used"] == 90 * GIB


@pytest.mark.parametrize(
    ("index", "environ", "expected"),
    [
        (1, {}, 1),
        (0, {"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        (1, {"CUDA_VISIBLE_DEVICES": " 2 , GPU-aa"}, 0),
        (0, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1),
    ],
)
def test_before_torch_can_say_the_environment_does(index: int, environ: dict[str, str], expected: int) -> None:
    """Among devices that are all alike, a number means the same to CUDA and to NVML."""
    assert device_of(Nvml(index, environ, Bindings()).memory(None, None, PID)) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},  # by speed or by place on the bus
        {"CUDA_VISIBLE_DEVICES": "MIG-aa"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "7"},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-xx"},
    ],
)
def test_where_it_could_be_another_device_it_is_unknown(environ: dict[str, str]) -> None:
    """Devices of two kinds, a slice, none or nonsense: no figures, and a sentence why."""
    found = Nvml(0, environ, Bindings(("H200", "H200", "L4"))).memory(None, None, PID)
    assert found.figures is None
    assert set(found.reasons) == {"device_memory"}


def test_the_uuid_of_torch_corrects_the_environment_and_a_slice_is_unknown() -> None:
    """NVML's figures of a sliced device would be those of the whole one."""
    nvml = Nvml(0, {}, Bindings())
    assert device_of(nvml.memory(None, None, PID)) == 0
    assert device_of(nvml.memory("GPU-cc", None, PID)) == 2
    nvml = Nvml(0, {}, Bindings(sliced=True))
    assert "MIG" in nvml.memory("GPU-aa", None, PID).reasons["device_memory"]
    assert "MIG" in nvml.memory("GPU-aa", None, PID).reasons["device_memory"]


def test_a_process_that_nvml_does_not_know_has_no_part() -> None:
    """Not listed, listed with less than torch holds or without an amount: None with the reason, the rest stays."""
    for pid, reserved in ((1, 50 * GIB), (9, 50 * GIB)):
        found = Nvml(0, {}, Bindings()).memory("GPU-aa", reserved, pid)
        assert found.figures is not None
        assert found.figures["by_this_process"] is found.figures["by_others"] is None
        assert set(found.reasons) == {"device_memory.by_this_process", "device_memory.by_others"}
        assert found.figures["used"] == 89 * GIB
    bindings = Bindings()
    bindings.processes = [SimpleNamespace(pid=PID, usedGpuMemory=None)]
    found = Nvml(0, {}, bindings).memory("GPU-aa", None, PID)
    assert "driver" in found.reasons["device_memory.by_this_process"]


def test_without_nvml_only_the_sum_is_known() -> None:
    """Without a driver a reason and no exception; CUDA alone knows the sum, and not who holds it."""
    found = Nvml(0, {}).memory(None, None, PID)
    assert found.figures is None
    assert "NVML" in found.reasons["device_memory"]
    figures = by_cuda(3, 10)
    assert (figures["used"], figures["by_this_process"], figures["source"]) == (7, None, "cuda")
