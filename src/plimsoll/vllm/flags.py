"""The flags of `vllm serve`, release by release."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.vllm import versions

UNKNOWN_DEFAULT = object()


class FlagRow(NamedTuple):
    """One flag over a stretch of releases in which its definition stayed the same."""

    name: str
    first: str  # first and last release of this stretch, both seen in a wheel
    last: str
    kind: str  # switch, on-off, true-false, int, human-int, human-int-or-auto, float, str, json, json-or-text, ...
    aliases: tuple[str, ...] = ()
    nargs: str | int | None = None
    choices: tuple[str, ...] | None = None
    default: Any = UNKNOWN_DEFAULT
    is_deprecated: bool = False
    repeats: bool = False
    is_optional: bool = False  # takes "None" and nothing at all as not set

    @property
    def takes_value(self) -> bool:
        return self.kind not in ("switch", "on-off")

    def begins_after(self, release: str) -> bool:
        """True if only a later release has it."""
        return versions.is_before(release, self.first)

    def ends_before(self, other: FlagRow) -> bool:
        """True if it was gone when the other stretch began."""
        return versions.is_before(self.last, other.first)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its option strings in the parser, without the `--no-` form."""
        return (self.name, *self.aliases)


def _row(name: str, plain: Mapping[str, Any]) -> FlagRow:
    choices = tuple(plain["choices"]) if "choices" in plain else None
    own = {_FIELDS.get(key, key): value for key, value in plain.items()}
    return FlagRow(**{**own, "name": name, "aliases": tuple(plain.get("aliases", ())), "choices": choices})


# Fields that are called otherwise in the table.
_FIELDS = {"from": "first", "to": "last", "deprecated": "is_deprecated", "optional": "is_optional"}


@functools.cache
def _places() -> Mapping[str, int]:
    return {release: place for place, release in enumerate(versions.wheels())}


@functools.cache
def flags_of(release: str) -> Mapping[str, FlagRow]:
    """Returns the row of every option string of one release, aliases included."""
    places = _places()
    here = places[release]
    found: dict[str, FlagRow] = {}
    for name, stretches in versions.rows("flags").items():
        for plain in stretches:
            if places[plain["from"]] <= here <= places[plain["to"]]:
                row = _row(name, plain)
                found.update(dict.fromkeys(row.spellings, row))
    return found


@functools.cache
def _names_by_alias() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, stretches in versions.rows("flags").items():
        for alias in {a for plain in stretches for a in plain.get("aliases", ())}:
            found[alias] = (*found.get(alias, ()), name)
    return found


def history_of(spelling: str) -> tuple[FlagRow, ...]:
    """Returns every stretch in which a parser knew this spelling, oldest first; empty if none ever did."""
    table = versions.rows("flags")
    found = [_row(spelling, plain) for plain in table.get(spelling, ())]
    for name in _names_by_alias().get(spelling, ()):
        found += [_row(name, plain) for plain in table[name] if spelling in plain.get("aliases", ())]
    return tuple(sorted(found, key=lambda row: _places()[row.first]))


def release_after(release: str) -> str | None:
    """Returns the next release that was read; None after the newest."""
    releases = list(_places())
    place = _places()[release] + 1
    return releases[place] if place < len(releases) else None


# The environment variables vLLM reads, release by release.

# Not vLLM's own, but read by torch, CUDA, NCCL or the model hub in the same process.
_NEIGHBOURS = ("CUDA_", "PYTORCH_", "TORCH", "NCCL_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TRITON_", "ROCR_", "HIP_",
               "OMP_", "RAY_", "GLOO_", "UCX_", "PROMETHEUS_MULTIPROC_DIR", "NVIDIA_", "LD_PRELOAD", "TOKENIZERS_")  # fmt: skip


_SURROUNDINGS = ("PYTHON", "LD_", "XDG_", "AWS_", "S3_", "MODELSCOPE_", "SSL_", "PLIMSOLL_")


def matters(name: str) -> bool:
    return name.startswith(("VLLM_", *_NEIGHBOURS))


def bears_on(name: str) -> bool:
    """True if a variable can change how the process that runs vLLM finds its code, its files or the network."""
    return matters(name) or name.upper().endswith(("PROXY", "PATH", "HOME")) or name.startswith(_SURROUNDINGS)


def default_in(name: str, release: str) -> object:
    """Returns the default that a release declares for a variable; None if it declares none."""
    return next((span.facts.get("default") for span in versions.spans_of("environment", name) if span.covers(release)), None)


def is_read_in(name: str, release: str) -> bool:
    """True if that release's source names the variable."""
    return any(span.covers(release) for span in versions.spans_of("environment", name))
