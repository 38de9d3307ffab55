"""Notes on flags that the wheels do not give: the replacement, the effect on memory, the numbers that are taken.

`data/flag_notes.json` has most of them. `rewrite` is what takes the flag's place in a command; `VALUES` stands for what
followed the old flag. A rewrite is used only where the target release has the new flag; without one the old flag is simply
left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from plimsoll.vllm.versions import Behaviour, Coverage, is_before, is_within, table
from plimsoll.vllm.versions import rows as rows_of

VALUES = "*"
_READ = Coverage.CONFIG_CHECKS.first


class Removal(NamedTuple):
    why: str
    instead: str | None = None
    rewrite: tuple[str, ...] = ()
    value_until: str = ""  # only the part of each value in front of this is kept
    only: frozenset[str] = frozenset()  # where these are the values that the new flag takes, whatever the old one took
    by_value: Mapping[str, list[str]] = {}  # what takes its place for each of these values; for any other nothing


def _removals(name: str) -> dict[str, Removal]:
    return {
        flag: Removal(**{**row, "rewrite": tuple(row.get("rewrite", ())), "only": frozenset(row.get("only", ()))})
        for flag, row in table("flag_notes")[name].items()
    }


# Flags that a release dropped.
GONE: Mapping[str, Removal] = _removals("gone")
GONE_VARIABLES: Mapping[str, Removal] = _removals("gone_variables")

# Flags that article after article passes on, and that no release ever had.
FOLKLORE: Mapping[str, str] = table("flag_notes")["folklore"]


class Implicit(NamedTuple):
    """A switch that says what is so anyway, from a release on."""

    since: str
    why: str


# A bare switch whose effect is the default: chunked prefill (None means on) is not visible in the parser's own default.
IMPLIED: Mapping[str, Implicit] = {
    "--enable-chunked-prefill": Implicit(Behaviour.V1_ENGINE.since, "on by default for generating models since V1 (0.8.0)"),
    # Until 0.25.1 hybrid (Mamba) models had it off by default, so the switch was not idle for them.
    "--enable-prefix-caching": Implicit(
        Behaviour.HYBRID_PREFIX_CACHING.since, "on by default where supported; for hybrid models too since 0.26.0"
    ),
}

# Taken by the parser and used by nothing. 0.32.0 says so itself when the flag is given.
IDLE: Mapping[str, Implicit] = {"--disable-cascade-attn": Implicit(_READ, "cascade attention is gone; vLLM ignores the flag")}


class Requirement(NamedTuple):
    """The flag without which another does nothing."""

    flag: str
    since: str | None = None  # the release whose source was read; None: it is so in every release that has both


# LoRA's settings are handed on only where `enable_lora` is set (EngineArgs.create_engine_config).
_OF_LORA = """--enable-lora-bias --enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-tower-connector-lora
 --fully-sharded-loras --lora-dtype --lora-extra-vocab-size --lora-target-modules --max-cpu-loras --max-lora-cls-labels
 --max-lora-rank --max-loras --specialize-active-lora""".split()

NEEDS: Mapping[str, Requirement] = {
    **dict.fromkeys(_OF_LORA, Requirement("--enable-lora")),
    "--kv-cache-metrics-sample": Requirement("--kv-cache-metrics", _READ),
    "--kv-offloading-backend": Requirement("--kv-offloading-size", _READ),
    "--max-log-len": Requirement("--enable-log-requests", _READ),
}

# Options whose set of values is open: a plugin can register more names, whatever the release's own parser lists.
OPEN_SETS = frozenset(
    "--reasoning-parser --tool-call-parser --quantization --speculative-model-quantization --load-format --tokenizer-mode"
    " --distributed-executor-backend --attention-backend --config-format".split()
)


@functools.cache
def own_values(flag: str, release: str) -> frozenset[str]:
    """The names that a release registers itself for such an option; empty where they were not read."""
    rows = ((key.partition(" "), spans) for key, spans in rows_of("values").items())
    return frozenset(v for (name, _, v), spans in rows if name == flag and any(is_within(span, release) for span in spans))


class AnnouncedRemoval(NamedTuple):
    release: str
    instead: str | None = None


# The newest release's own deprecation warnings (engine/arg_utils.py, config/model.py).
ANNOUNCED: Mapping[str, AnnouncedRemoval] = {
    flag: AnnouncedRemoval(**row) for flag, row in table("flag_notes")["announced"].items()
}

# What a flag does to memory: shown beside changed defaults and used by the planner's advice.
MEMORY: Mapping[str, str] = table("flag_notes")["memory"]


class NumberRange(NamedTuple):
    """The numbers that vLLM's configuration takes for a flag, once its parser took the word."""

    least: float
    most: float = math.inf
    above: bool = False  # the least itself is refused
    below: bool = False  # the most itself is refused
    since: str | None = None  # the release whose source was read; None: it is so in every release
    unless: frozenset[str] = frozenset()  # beside these nobody looks at the number

    def problem(self, value: str) -> str | None:
        """Why the number is refused; None if it is not, or is no number."""
        try:
            number = float(value)
        except ValueError:
            return None
        low = number > self.least if self.above else number >= self.least
        high = number < self.most if self.below else number <= self.most
        if low and high:
            return None
        ends = [f"{'above' if self.above else 'at least'} {self.least:g}"]
        ends += [f"{'below' if self.below else 'at most'} {self.most:g}"] if self.most < math.inf else []
        return f"{value!r} is not {' and '.join(ends)}"


# The limits in vLLM's configuration classes; earlier releases had some of them and were not read for it.
_FROM_ONE = NumberRange(1, since=_READ)
RANGES: Mapping[str, NumberRange] = {
    "--gpu-memory-utilization": NumberRange(0, 1, above=True),
    # No socket has another number. With these the server listens elsewhere or not at all.
    "--port": NumberRange(0, 65535, unless=frozenset({"--uds", "--headless", "--grpc"})),
    "--tensor-parallel-size": _FROM_ONE,
    "--pipeline-parallel-size": _FROM_ONE,
    "--decode-context-parallel-size": _FROM_ONE,
    "--max-num-seqs": _FROM_ONE,
    "--max-num-batched-tokens": _FROM_ONE,
    "--block-size": _FROM_ONE,
    "--stream-interval": _FROM_ONE,
    "--cpu-offload-gb": NumberRange(0, since=_READ),
    "--watermark": NumberRange(0, 1, below=True, since=_READ),
}


_Note = TypeVar("_Note", Implicit, Requirement, NumberRange)


def in_force(table: Mapping[str, _Note], flag: str, release: str) -> _Note | None:
    """The flag's note in one of these tables; None where there is none, or it begins with a later release."""
    note = table.get(flag)
    return None if note is None or (note.since is not None and is_before(release, note.since)) else note
