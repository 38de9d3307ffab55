"""Derives a model that is not in the catalogue from one that is: an edition, a copy, another quantisation or a fine-tune of it.

    Qwen/Qwen3-32B-AWQ             Qwen/Qwen3-32B, quantised as its name says
    google/gemma-4-26B-A4B-it      google/gemma-4-26B-A4B
    unsloth/gpt-oss-20b            openai/gpt-oss-20b
    Qwen/Qwen3.6-27B               nvidia/Qwen3.6-27B-NVFP4 without its quantisation
    elyza/Llama-3-ELYZA-JP-8B      meta-llama/Meta-Llama-3-8B, whose family, version and size it names

The shape is always a catalogued model's, never worked out from a name. The notes say what the name cannot tell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.models.shape import FAMILY_TABLE
from plimsoll.vllm import versions

_ROWS: tuple[Mapping[str, Any], ...] = tuple(FAMILY_TABLE["quantised_names"]["rows"])
_QUANTIZED = re.compile(rf"[-_.]{FAMILY_TABLE['quantised_names']['word']}(?=[-_.:]|$)")
_ANOTHER_MODEL = re.compile(FAMILY_TABLE["finetuned_names"]["another_model"])
# Endings of one model's editions, which share a shape: tuned for instructions, dated, in another format.
_EDITION = r"instruct|it|chat|base|thinking|reasoning|hf|pt|text|2\d{3}|[01]\d{3}|0[1-9]-20\d\d"
# Endings that do not change the shape: a head that drafts, the engine or card it was made for, removed refusals, a GGUF file.
_ASIDE = r"[-_.](?:mtp|vllm|sglang|dynamo|rtx-?\d{4}|abliterated|uncensored|heretic)|:[\w.-]+"
# A name's words: sizes and versions stay whole, a family and the version written against it are two.
_WORD = re.compile(r"[ae]\d+(?:\.\d+)?b|\d+x\d+(?:\.\d+)?b|v\d+(?:[._]\d+)*|\d+(?:[._]\d+)?[a-z]*|[a-z]+")
_SIZE = re.compile(r"[ae]?\d+(?:\.\d+)?[bt]|\d+x\d+(?:\.\d+)?b|\d+e|\d\d+m")
# Makers whose own checkpoints are quantised: without a file it is unknown how much of one is.
_BORN_QUANTISED = ("deepseek", "kimi", "minimax", "gpt-oss", "mistral", "ministral", "devstral", "magistral")
_NOT_QUANTISED_ALIKE = (
    "Parts that a quantised checkpoint keeps in 16 bits, often attention, experts' routers or towers, are not known"
)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A model's name split into its stem and what its other words mean."""

    stem: str
    editions: tuple[str, ...]
    quantized: str | None  # how, in words; None where the name does not say
    settings: Mapping[str, Any] | None  # its quantization_config

    @property
    def edition(self) -> str:
        return "-".join((self.stem, *self.editions))

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word.replace("_", ".") for word in _WORD.findall(self.stem))


@functools.cache
def _parsed(name: str) -> _Parsed:
    owner, _, rest = name.lower().rpartition("/")
    says = "".join(match.group() for match in _QUANTIZED.finditer(rest))
    row = next((row for row in _ROWS if says and re.search(row["has"], f"{owner}/{says}")), None)
    if row:
        rest = _QUANTIZED.sub("", rest)
    while (bare := re.sub(rf"(.)(?:{_ASIDE})$", r"\1", rest)) != rest:
        rest = bare
    editions: list[str] = []
    while match := re.fullmatch(rf"(.+)-({_EDITION})", rest):
        rest = match.group(1)
        editions.insert(0, match.group(2))
    stem = re.sub("^(?:meta|huihui|c4ai)-|(?<=b-v[1-9])[._][1-9]", "", rest)  # -v2.3 and -v2.6 are one model's releases
    return _Parsed(stem, tuple(editions), row["says"] if row else None, row["config"] if row else None)


@dataclass(frozen=True, slots=True)
class Derivation:
    """The catalogued model that a name is derived from, and the changes to its config."""

    base: str
    settings: Mapping[str, Any] | None  # a quantization_config to put in; None where there is none
    is_requantized: bool  # the base's own quantisation does not count
    notes: tuple[str, ...]


def derive(name: str, known: Mapping[str, bool]) -> Derivation | None:
    """The derivation of a name from the catalogue (`known`: id to whether it is quantised); None where nothing is near enough.

    Another owner's copy counts under the same name, with an ending that says how it was quantised, or as a fine-tune.
    """
    wanted = _parsed(name)
    owner = name.partition("/")[0].lower()
    ranked = []
    for other, is_quantized in known.items():
        parsed = _parsed(other)
        is_own = other.partition("/")[0].lower() == owner
        beside = 0
        if parsed.stem != wanted.stem:
            beside = 0 if is_own else _words_beside(wanted.words, parsed.words)
            if not beside or "NVFP4" in (wanted.quantized or ""):  # a fine-tuner's own recipe: attention may be in 16 bits
                continue
        elif parsed.edition != wanted.edition and not (is_own or wanted.quantized):
            beside = 1
        if parsed.quantized and not wanted.quantized and parsed.stem.startswith(_BORN_QUANTISED):
            continue
        # The fewest words beside, the nearest edition, then one that is not quantised, then the same owner's; the shortest name
        # decides the rest.
        ranked.append((beside, parsed.edition != wanted.edition, is_quantized, not is_own, len(other), other))
    if not ranked:
        return None
    beside, is_other_edition, is_quantized, is_foreign, _, base = min(ranked)
    notes = [f"Derived: the catalogue does not have {name}; its shape is that of {base}."]
    if wanted.quantized and wanted.settings:
        notes.append(f"Its name says how it is quantised, taken as {wanted.quantized}. {_NOT_QUANTISED_ALIKE}.")
    elif is_quantized and _parsed(base).quantized:
        notes.append(f"{base} is the quantised edition; this one was taken as not quantised.")
    if beside:
        notes.append("Its name holds that model's: it was taken as a fine-tune; another vocabulary or context is not known.")
    elif is_other_edition:
        notes.append("The edition is another: its longest context may differ.")
    elif is_foreign and not wanted.quantized and not _parsed(base).quantized:
        notes.append("The owner is another: it was taken to be a copy.")
    is_requantized = bool(wanted.quantized) or _parsed(base).quantized is not None
    return Derivation(base, wanted.settings, is_requantized, tuple(notes))


def _words_beside(wanted: tuple[str, ...], base: tuple[str, ...]) -> int:
    """How many words a name has beside those of a base model that it names whole; 0 where it does not, or names more than that.

    Family and version stand together, sizes are the same ones, and no other word names an architecture that vLLM registers.
    """
    sizes = [word for word in base if _SIZE.fullmatch(word)]
    if not sizes or sizes != [word for word in wanted if _SIZE.fullmatch(word)]:
        return 0
    head = base[: base.index(sizes[0])]
    tail = [word for word in base[len(head) :] if not word.startswith("v0.")]
    starts = [at for at in range(len(wanted)) if wanted[at : at + len(head)] == head]
    if not head or not starts:
        return 0
    rest = list(wanted[: starts[0]] + wanted[starts[0] + len(head) :])
    after = rest[starts[0] : starts[0] + 1]
    if any(word not in rest for word in tail) or (after and after[0] not in tail and re.match(r"v?\d", after[0])):
        return 0
    for word in tail:
        rest.remove(word)
    family = "".join(head).replace(".", "_")
    if any(_ANOTHER_MODEL.fullmatch(word) or word in _families() for word in rest):
        return 0
    return 0 if any(there.startswith(family + word) for there in _families() for word in rest) else len(rest) + 1


@functools.cache
def _families() -> frozenset[str]:
    """The families whose architectures a release of vLLM registers, as names spell them: idefics and idefics3, qwen3vl."""
    whole = {re.split("For|Model|LMHead", name)[0].lower() for name in versions.rows("architectures")}
    return frozenset(whole | {re.split(r"[\d_]", name)[0] for name in whole})
