"""The needs of plimsoll.inside in vLLM (`vllm/data/extension_needs.yaml`), looked up in the signatures of its sources.

Nothing of vLLM is run: `judge` reads its files, `answers_in` the table of the releases, `verdicts` sums up either.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import msgspec

from plimsoll.vllm import versions
from plimsoll.vllm.flags import flags_of
from plimsoll.vllm.versions import Coverage

ANY = "*"  # among the arguments of a function: it also takes any others


class ClassShape(NamedTuple):
    """One class: its methods with their arguments, and the attributes that it assigns to `self` or declares as fields."""

    methods: dict[str, tuple[str, ...]]
    attributes: frozenset[str]


class FileShape(NamedTuple):
    classes: dict[str, ClassShape]
    functions: dict[str, tuple[str, ...]]
    words: frozenset[str]  # every name, attribute and text constant in the code, without comments
    assigned: frozenset[str]  # attributes of any object that get a value


class Sources(NamedTuple):
    """Access to the files of one vLLM: one file by its path in the package, and the files of a folder."""

    read: Callable[[str], str | None]  # None: there is no such file
    listed: Callable[[str], Sequence[str]]


@functools.lru_cache(maxsize=64)
def shape_of(text: str) -> FileShape | None:
    """Returns the definitions in a file; None where this Python cannot parse it."""
    try:
        tree = ast.parse(text)
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        shapes = {node.name: ClassShape(_functions(node.body), frozenset(_attributes(node))) for node in classes}
        return FileShape(shapes, _functions(tree.body), *_words(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _functions(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            found[node.name] = (*names, ANY) if given.kwarg is not None else tuple(names)
    return found


def _attributes(node: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for statement in node.body:
        names |= {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
    return names


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _words(tree: ast.Module) -> tuple[frozenset[str], frozenset[str]]:
    words: set[str] = set()
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                assigned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        elif isinstance(node, ast.alias):
            words.add(node.name)
    return frozenset(words), frozenset(assigned)


class InsidePart(StrEnum):
    PROBE = "probe"
    GATE = "gate"
    DRAIN = "drain"
    SHED = "shed"
    RECORDER = "recorder"


class NeedState(StrEnum):
    FOUND = "found"
    DIFFERENT = "different"  # the name exists, but not as we need it
    ABSENT = "absent"
    NOT_NEEDED = "not needed"

    @property
    def is_met(self) -> bool:
        return self in (NeedState.FOUND, NeedState.NOT_NEEDED)


class Weight(StrEnum):
    """The loss to a part by an unmet need: the whole part, a piece that people count on, or a detail."""

    MUST = "must"
    HELPS = "helps"
    DETAIL = "detail"


class Symbols(msgspec.Struct, frozen=True):
    """A file and the names it must define, all of them."""

    files: tuple[str, ...] = msgspec.field(name="in")  # alternative files of the releases, as paths inside the package
    owner: str = ""  # the class that has the methods and attributes
    methods: dict[str, tuple[str, ...]] = {}  # name, and the arguments we give it
    begins: dict[str, tuple[str, ...]] = {}  # name, and its required first arguments: ours replaces it
    attributes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # names or text constants that the file's code uses
    assigned: tuple[str, ...] = ()  # attributes that the file's code sets on some object


class Way(msgspec.Struct, frozen=True):
    """One of the forms in which releases meet a need."""

    looks: tuple[Symbols, ...]
    says: str = ""  # how it is used in this form


class Need(msgspec.Struct, frozen=True):
    name: str
    purpose: str
    lost: str  # the loss without it
    weights: dict[InsidePart, Weight]
    ways: tuple[Way, ...] = ()  # the best first
    unneeded_without: Symbols | None = None  # a release without this has no use for it
    unneeded_because: str = ""
    none_in: tuple[str, ...] = ()  # folders whose classes must not define the `forbidden` name
    forbidden: str = ""  # a name, or the beginning of one if it ends in _


@dataclass(frozen=True, slots=True)
class NeedAnswer:
    name: str
    state: NeedState
    where: str = ""  # the file that shows it
    note: str = ""


@dataclass(frozen=True, slots=True)
class PartVerdict:
    part: InsidePart
    works: str  # yes, partly, no
    because: tuple[str, ...] = ()  # losses, the worst first
    details: tuple[str, ...] = ()  # minor losses


def judge(sources: Sources, needs: Sequence[Need]) -> tuple[NeedAnswer, ...]:
    return tuple(_forbidden(need, sources) if need.forbidden else _answer(need, sources) for need in needs)


def _answer(need: Need, sources: Sources) -> NeedAnswer:
    nearest: NeedAnswer | None = None
    for way in need.ways:
        found = [_look(look, sources) for look in way.looks]
        wrong = next((inner for inner in found if not inner.state.is_met), None)
        if wrong is None:
            return NeedAnswer(need.name, NeedState.FOUND, found[0].where, way.says)
        if nearest is None or (wrong.state is NeedState.DIFFERENT and nearest.state is NeedState.ABSENT):
            nearest = wrong
    if need.unneeded_without is not None and not _look(need.unneeded_without, sources).state.is_met:
        return NeedAnswer(need.name, NeedState.NOT_NEEDED, note=need.unneeded_because)
    assert nearest is not None, f"{need.name} has no ways"
    return replace(nearest, name=need.name)


def _look(look: Symbols, sources: Sources) -> NeedAnswer:
    """Returns FOUND if one of the files has everything; else the answer of the file that has most."""
    nearest = NeedAnswer("", NeedState.ABSENT, look.files[0], "there is no such file")
    for path in look.files:
        text = sources.read(path)
        if text is None:
            continue
        missing, has_owner = _missing(look, text)
        if not missing:
            return NeedAnswer("", NeedState.FOUND, path)
        state = NeedState.DIFFERENT if has_owner else NeedState.ABSENT
        if nearest.state is NeedState.ABSENT:
            nearest = NeedAnswer("", state, path, missing)
    return nearest


def _missing(look: Symbols, text: str) -> tuple[str, bool]:
    """Returns the first thing that is missing, and True if at least what should hold it is there."""
    shape = shape_of(text)
    if shape is None:
        return "the file cannot be parsed", True
    owner = shape.classes.get(look.owner) if look.owner else None
    if look.owner and owner is None:
        return f"there is no class {look.owner}", False
    methods = owner.methods if owner is not None else shape.functions
    for name, arguments in look.methods.items():
        shown = f"{look.owner}.{name}" if look.owner else name
        if name not in methods:
            return f"there is no {shown}", owner is not None
        lacking = [argument for argument in arguments if argument not in methods[name]]
        if lacking and ANY not in methods[name]:
            return f"{shown} does not take {', '.join(lacking)}", True
    for name, arguments in look.begins.items():
        if methods.get(name, ())[: len(arguments)] != arguments:
            return f"{look.owner}.{name} does not begin with {', '.join(arguments[1:])}", True
    attributes = owner.attributes | set(owner.methods) if owner is not None else shape.assigned
    gone = [name for name in look.attributes if name not in attributes]
    if gone:
        return f"{look.owner or 'the file'} has no {', '.join(gone)}", owner is not None
    gone = [word for word in look.words if word not in shape.words] + [n for n in look.assigned if n not in shape.assigned]
    return (f"its code does not name {', '.join(gone)}", False) if gone else ("", True)


def _forbidden(need: Need, sources: Sources) -> NeedAnswer:
    """Returns the answer to a need that a name does not exist."""
    is_beginning = need.forbidden.endswith("_") and not need.forbidden.startswith("__")
    for folder in need.none_in:
        for path in sources.listed(folder):
            text = sources.read(path)
            shape = shape_of(text) if text is not None and need.forbidden in text else None
            for name, inner in (shape.classes if shape is not None else {}).items():
                names = {*inner.methods, *inner.attributes}
                taken = [n for n in sorted(names) if n == need.forbidden or (is_beginning and n.startswith(need.forbidden))]
                if taken:
                    return NeedAnswer(need.name, NeedState.DIFFERENT, path, f"{name} defines {taken[0]}")
    return NeedAnswer(need.name, NeedState.FOUND, need.none_in[0])


def verdicts(answers: Sequence[NeedAnswer], needs: Sequence[Need]) -> tuple[PartVerdict, ...]:
    states = {answer.name: answer.state for answer in answers}
    made = []
    for part in InsidePart:
        lost: dict[Weight, list[str]] = {weight: [] for weight in Weight}
        for need in needs:
            weight = need.weights.get(part)
            if weight is not None and not states.get(need.name, NeedState.ABSENT).is_met:
                lost[weight].append(need.lost)
        works = "no" if lost[Weight.MUST] else "partly" if lost[Weight.HELPS] else "yes"
        because = (*lost[Weight.MUST], *lost[Weight.HELPS])
        made.append(PartVerdict(part, works, tuple(dict.fromkeys(because)), tuple(dict.fromkeys(lost[Weight.DETAIL]))))
    return tuple(made)


NEEDS = msgspec.convert(versions.yaml_table("extension_needs")["needs"], tuple[Need, ...])

# Variables that keep parts of it from working where a release reads them.
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
FIRST_ENGINE = "VLLM_USE_V1"
PLUGIN_LIST = "VLLM_PLUGINS"

# Releases that were run and not only read.
TESTED = {Coverage.INSIDE_ON_CPU.last: "tested on CPU", Coverage.INSIDE_ON_GPU.last: "tested on an H200"}
BY_SIGNATURE = "by signature, read from the wheel"


# Knobs of plimsoll.inside, each with the flag whose limit it changes: a release without the flag has no such limit.
KNOB_FLAGS = {
    "max-num-seqs": "--max-num-seqs", "max-num-batched-tokens": "--max-num-batched-tokens", "kv-headroom": "--watermark",
    "long-prefill-token-threshold": "--long-prefill-token-threshold", "max-num-queued-reqs": "--max-num-queued-reqs",
    "max-num-queued-tokens": "--max-num-queued-tokens",
}  # fmt: skip


def knob_lines(release: str) -> tuple[str, ...]:
    """Returns lines on the knobs that can be set in a running engine of this release, and those that it lacks."""
    known = flags_of(release)
    there = [knob for knob, flag in KNOB_FLAGS.items() if flag in known]
    absent = [knob for knob in KNOB_FLAGS if knob not in there]
    lines = [f"turns {', '.join(there)}"]
    lines += [f"not in this release: {', '.join(absent)}"] if absent else []
    return (*lines, "max-num-batched-tokens and long-prefill-token-threshold need chunked prefill; no data parallel engines")


def answers_in(release: str) -> tuple[NeedAnswer, ...]:
    """Returns the answers that were read in a release's wheel."""
    found = [(need.name, span) for need in NEEDS for span in versions.spans_of("inside", need.name)]
    return tuple(
        NeedAnswer(name, NeedState(span.facts["state"]), note=span.facts.get("note", ""))
        for name, span in found
        if span.covers(release)
    )
