"""Derives a model that is not in the catalogue from one that is: an edition, a copy or another quantisation of it.

    Qwen/Qwen3-32B-AWQ             Qwen/Qwen3-32B, quantised as its name says
    google/gemma-4-26B-A4B-it      google/gemma-4-26B-A4B
    unsloth/gpt-oss-20b            openai/gpt-oss-20b
    Qwen/Qwen3.6-27B               nvidia/Qwen3.6-27B-NVFP4 without its quantisation

The shape is always a catalogued model's, never worked out from a name. The notes say what the name cannot tell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.models.shape import FAMILY_TABLE

_QUANTIZED: tuple[tuple[str, str | None, str, Mapping[str, Any] | None], ...] = tuple(
    (row["ending"], row.get("owner"), row["says"], row["config"]) for row in FAMILY_TABLE["quantised_names"]["rows"]
)
# Endings of one model's editions, which share a shape: tuned for instructions, dated, in another format.
_EDITION = r"instruct|it|chat|base|thinking|reasoning|hf|pt|text|2\d{3}|[01]\d{3}|0[1-9]-20\d\d"
# Endings that do not change the shape: a drafter, the engine or card the model was made for, removed refusals, a file of a GGUF
# repository.
_ASIDE = r"[-_.](?:mtp|dspark|vllm|sglang|awq-marlin|dynamo|rtx-?\d{4}|abliterated|uncensored|heretic)|:[\w.-]+"
# Makers whose own checkpoints are quantised: without a file it is unknown how much of one is.
_BORN_QUANTISED = ("deepseek", "kimi", "minimax", "gpt-oss", "mistral", "ministral", "devstral", "magistral")
_NOT_QUANTISED_ALIKE = (
    "Parts that a quantised checkpoint keeps in 16 bits, often attention, experts' routers or towers, are not known"
)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A model's name split into its stem and what its endings mean."""

    stem: str
    editions: tuple[str, ...]
    quantized: str | None  # how, in words; None where the name does not say
    settings: Mapping[str, Any] | None  # its quantization_config

    @property
    def edition(self) -> str:
        return "-".join((self.stem, *self.editions))


@functools.cache
def _parsed(name: str) -> _Parsed:
    owner, _, rest = name.lower().rpartition("/")
    quantized, settings = None, None
    for _ in range(4):  # -FP8-KV, -Instruct-AWQ-INT4, -NVFP4-MTP
        rest = re.sub(rf"(.)(?:{_ASIDE})$", r"\1", rest)
        for ending, whose, words, config in _QUANTIZED:
            if whose in (None, owner) and (match := re.fullmatch(rf"(.+?)[-_.](?:{ending})", rest)):
                rest = match.group(1)
                quantized, settings = quantized or words, settings if quantized else config
                break
        else:
            break
    editions: list[str] = []
    while match := re.fullmatch(rf"(.+)-({_EDITION})", rest):
        rest = match.group(1)
        editions.insert(0, match.group(2))
    return _Parsed(re.sub("^(?:meta|huihui|c4ai)-", "", rest), tuple(editions), quantized, settings)


@dataclass(frozen=True, slots=True)
class Derivation:
    """The catalogued model that a name is derived from, and the changes to its config."""

    base: str
    settings: Mapping[str, Any] | None  # a quantization_config to put in; None where there is none
    is_requantized: bool  # the base's own quantisation does not count
    notes: tuple[str, ...]


def derive(name: str, known: Mapping[str, bool]) -> Derivation | None:
    """The derivation of a name from the catalogue (`known`: id to whether it is quantised); None where nothing is near enough.

    Another owner's copy counts only under the very same name, or with an ending that says how it was quantised.
    """
    wanted = _parsed(name)
    owner = name.partition("/")[0].lower()
    ranked = []
    for other, is_quantized in known.items():
        parsed = _parsed(other)
        if parsed.stem != wanted.stem:
            continue
        is_own = other.partition("/")[0].lower() == owner
        if parsed.edition != wanted.edition and not (is_own or wanted.quantized):
            continue
        if parsed.quantized and not wanted.quantized and parsed.stem.startswith(_BORN_QUANTISED):
            continue
        # The nearest edition, then one that is not quantised, then the same owner's; the shortest name decides the rest.
        ranked.append((parsed.edition != wanted.edition, is_quantized, not is_own, len(other), other))
    if not ranked:
        return None
    is_other_edition, is_quantized, is_foreign, _, base = min(ranked)
    notes = [f"Derived: the catalogue does not have {name}; its shape is that of {base}."]
    if wanted.quantized and wanted.settings:
        notes.append(f"Its name says how it is quantised, taken as {wanted.quantized}. {_NOT_QUANTISED_ALIKE}.")
    elif is_quantized and _parsed(base).quantized:
        notes.append(f"{base} is the quantised edition; this one was taken as not quantised.")
    if is_other_edition:
        notes.append("The edition is another: its longest context may differ.")
    elif is_foreign and not wanted.quantized and not _parsed(base).quantized:
        notes.append("The owner is another: it was taken to be a copy.")
    is_requantized = bool(wanted.quantized) or _parsed(base).quantized is not None
    return Derivation(base, wanted.settings, is_requantized, tuple(notes))
