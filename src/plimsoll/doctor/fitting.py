"""Cures that suit this very server: none that it has already, and none that a setting of its own overrules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from plimsoll.domain.finding import Finding, Remedy

# A cache whose size was set by hand does not follow the card's share.
_BY_HAND = (
    ("num_gpu_blocks_override", "--num-gpu-blocks-override", "it fixes the number of blocks, whatever the card has"),
    ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", "it fixes the size of the cache, whatever the card has"),
)


_LOWERED = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--max-cudagraph-capture-size", "--max-loras"})
_COUNT = re.compile(r"['\"](\w{1,20})['\"]: ?(\d{1,9})(?![\w.])")


def fitting(finding: Finding, flags: Mapping[str, str]) -> Finding:
    """The finding with its cures sorted out for a server that was started with these flags."""
    remedy = tuple(_suiting(finding, flags))
    return finding if remedy == finding.remedy else finding._replace(remedy=remedy)


def _suiting(finding: Finding, flags: Mapping[str, str]) -> Iterator[Remedy]:
    by_hand = next((row for row in _BY_HAND if flags.get(row[0], "None") != "None"), None)
    told = any(by_hand is not None and one.flag == by_hand[1] for one in finding.remedy)
    for one in finding.remedy:
        if (
            by_hand is not None
            and one.flag == "--gpu-memory-utilization"
            and finding.code.startswith(("kv.", "startup.no", "startup.con"))
        ):
            if not told:
                told = True
                yield Remedy(f"{by_hand[1]} is set to {flags[by_hand[0]]}: raise it, or leave it out", by_hand[2], by_hand[1])
        elif not _is_so_already(one, flags):
            yield one


def _is_so_already(remedy: Remedy, flags: Mapping[str, str]) -> bool:
    if remedy.flag is None:
        return "a quantised checkpoint" in remedy.do and flags.get("quantization", "None") != "None"
    now = flags.get(remedy.flag.removeprefix("--").replace("-", "_"))
    if now is None and remedy.flag == "--max-loras" and flags.get("enable_lora") == "True":
        now = "1"  # what was typed is known, and vLLM prints only what differs from its own defaults
    if remedy.flag == "--limit-mm-per-prompt" and now is not None:
        counts = dict(_COUNT.findall(now))
        return "image" in counts and all(int(count) <= 1 for count in counts.values())
    if remedy.flag == "--kv-cache-dtype" and now is not None and now.startswith("fp8"):
        return True
    if now is None or remedy.value is None:
        return False
    if remedy.flag in _LOWERED and now.isascii() and now.isdigit() and remedy.value.isdigit():
        return int(remedy.value) >= int(now)  # offered to be lower, and it is not
    return now == remedy.value
