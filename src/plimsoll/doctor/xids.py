"""What NVIDIA's Xid numbers mean, who caused them and what to do, after its Xid catalog (docs.nvidia.com/deploy/xid-errors)."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Blame(StrEnum):
    """Where an Xid points."""

    PROGRAM = "program"  # a GPU program did wrong: a bug, rarely a card
    ECHO = "echo"  # says only that something else happened before
    FAULT = "fault"  # the card, its link, its firmware or its driver
    REPAIRED = "repaired"  # a fault that was put right: watch it
    UNKNOWN = "unknown"


class Xid(NamedTuple):
    """One number of the catalog."""

    number: int
    meaning: str
    blame: Blame
    cure: str


_RESTART = "start vLLM again; if it returns, look for the bug in a kernel, not in the card"
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset, or a reboot); if it returns, have the card checked"
_REPLACE = "take the GPU out of service and ask the vendor for a replacement"
_WATCH = "nothing at once; reset the GPU at the next quiet moment and watch whether it returns"
_LINK = "drain the node, reset all its GPUs together, then look at `nvidia-smi nvlink -s` and the fabric manager's log"

_TABLE: tuple[Xid, ...] = (
    Xid(8, "the GPU stopped working on a program", Blame.PROGRAM, _RESTART),
    Xid(11, "a broken command stream", Blame.PROGRAM, _RESTART),
    Xid(13, "an exception in a GPU program (out of range, illegal instruction or misaligned)", Blame.PROGRAM, _RESTART),
    Xid(31, "a GPU program touched memory that is not mapped (page fault)", Blame.PROGRAM, _RESTART),
    Xid(32, "a broken command stream between driver and GPU, mostly a poor PCIe link", Blame.FAULT, _RESET),
    Xid(38, "the GPU's scheduling firmware timed out", Blame.FAULT, _RESET),
    Xid(43, "a program was stopped after its own fault; the GPU is healthy", Blame.PROGRAM, _RESTART),
    Xid(45, "the driver cleaned up after a program that was ended (killed or failed)", Blame.ECHO, "find what ended it"),
    Xid(46, "the GPU stopped working", Blame.FAULT, _RESET),
    Xid(48, "an uncorrectable (double bit) memory error", Blame.FAULT, _RESET),
    Xid(54, "the board's extra power plug is not connected", Blame.FAULT, "check the power cable, then reboot"),
    Xid(61, "an internal controller of the GPU hit a breakpoint", Blame.FAULT, _RESET),
    Xid(62, "an internal controller of the GPU halted", Blame.FAULT, _RESET),
    Xid(63, "a bad memory row was marked for replacement", Blame.REPAIRED, _WATCH),
    Xid(64, "a bad memory row could NOT be replaced", Blame.FAULT, f"{_RESET}; after another one {_REPLACE}"),
    Xid(69, "a GPU program used the engine wrongly (class error)", Blame.PROGRAM, _RESTART),
    Xid(74, "an NVLink error; the other end of the link may be the broken one", Blame.FAULT, _LINK),
    Xid(79, "the GPU has fallen off the bus: the host can no longer reach it", Blame.FAULT,
        "reboot the machine (a reset is not enough); if it returns, check power, heat, seating and slot, or replace the card"),
    Xid(92, "many corrected (single bit) memory errors", Blame.REPAIRED, _WATCH),
    Xid(94, "an uncorrectable memory error that hit one program only", Blame.FAULT,
        "start vLLM again; reset the GPU at the next quiet moment, so that the bad row is replaced"),
    Xid(95, "an uncorrectable memory error that may have hit every program on the GPU", Blame.FAULT, _RESET),
    Xid(109, "switching between programs on the GPU timed out", Blame.FAULT, _RESET),
    Xid(110, "a security fault in the GPU", Blame.FAULT, _RESET),
    Xid(119, "the GPU's own processor (GSP) did not answer the driver", Blame.FAULT,
        f"{_RESET}; if it returns, change the driver's version or turn the GSP firmware off (NVreg_EnableGpuFirmware=0)"),
    Xid(120, "the GPU's own processor (GSP) reported an error", Blame.FAULT,
        f"{_RESET}; if it returns, change the driver's version"),
    Xid(121, "corrected errors on the link between CPU and GPU", Blame.REPAIRED, _WATCH),
    Xid(136, "an NVLink could not be brought up", Blame.FAULT, _LINK),
    Xid(137, "a GPU program reached into another GPU's memory where it must not (NVLink)", Blame.PROGRAM, _RESTART),
    Xid(140, "uncorrectable memory errors that the driver could not deal with", Blame.FAULT, _RESET),
    Xid(143, "the GPU could not be initialised", Blame.FAULT, _RESET),
    *(Xid(n, "an NVLink error (fifth generation)", Blame.FAULT, _LINK) for n in range(144, 151)),
    Xid(151, "an error while changing encryption keys", Blame.FAULT, "restart the virtual machine"),
    Xid(154, "the driver says how to recover from another Xid", Blame.ECHO, "do what the line says"),
    Xid(155, "an NVLink was taken down by software", Blame.REPAIRED, _LINK),
    Xid(156, "a failing part of the GPU was retired", Blame.REPAIRED, _WATCH),
    Xid(157, "a failing part of the GPU could NOT be retired: no spare is left", Blame.FAULT, _REPLACE),
    Xid(158, "the GPU did not answer in time, for good", Blame.FAULT, _RESET),
    Xid(167, "the PCIe link timed out for good", Blame.FAULT, "reboot the machine; if it returns, check seating and slot"),
    Xid(171, "an uncorrectable error in the GPU's main memory", Blame.FAULT, _RESET),
    Xid(172, "an uncorrectable error in memory inside the GPU chip", Blame.FAULT, f"{_RESET}; past the threshold {_REPLACE}"),
)  # fmt: skip
_BY_NUMBER = {xid.number: xid for xid in _TABLE}


def explain(number: int) -> Xid:
    """What the number means; one that is not in the table is said to be unknown, never guessed."""
    unknown = "a GPU error this table does not hold"
    return _BY_NUMBER.get(number) or Xid(number, unknown, Blame.UNKNOWN, "look the number up in NVIDIA's Xid catalog")
