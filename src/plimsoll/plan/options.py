"""The options that say on which card, beside what and in which vLLM a server runs."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_names
from plimsoll.launch.options import Words, count, option
from plimsoll.units import GIB, format_gib, parse_gib
from plimsoll.vllm.versions import releases

MOST_MEMORY = 1024 * GIB  # beyond what any card has: a figure in MiB, most likely


def memory_of(text: str, name: str) -> int:
    """A card's memory in bytes."""
    memory = parse_gib(text)
    if memory == 0:
        raise BadInput(f"{name} 0: a card has memory")
    if memory > MOST_MEMORY:
        what = f"{name} {text}: no card has {format_gib(memory)}"
        raise BadInput(f"{what}; a number alone is GiB, nvidia-smi's are MiB: 23034MiB")
    return memory


@dataclass(frozen=True, kw_only=True)
class CardOptions(Words):
    """The card that a server runs on."""

    gpu: str | None = option("NAME", "the card: H100, L40S, ... (docs/gpus.md); default: this machine's", offers=gpu_names)
    gpu_memory_gib: int | None = option(
        "X", "a card that is not known, by the memory vLLM sees; with --gpu it replaces the card's total", read=memory_of
    )  # bytes


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CardOptions):
    """The card, how many of it, what else is on it, and the vLLM that runs there."""

    gpus: int | None = option("N", "how many there are; default: as many as the command needs (TP x PP x DP)", read=count)
    used_gib: int = option("X", "memory that other processes hold on the card", read=lambda text, _: parse_gib(text), default=0)
    vllm: str | None = option("VERSION", "default: the vLLM installed beside plimsoll, else the newest known", offers=releases)
    came_from: str | None = None  # of commands that have --from: the version that an upgrade starts from
