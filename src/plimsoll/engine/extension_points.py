"""Whether a vLLM, by the signatures in its sources, will take `plimsoll.inside`; nothing of vLLM is run to learn it.

judge(sources)    one answer for each need of extension_needs.py, and what they make of each part
verdicts(answers) the same from answers that were kept, as the table of releases has them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from plimsoll.engine.source_shapes import ANY, Sources, shape_of


class Part(StrEnum):
    """What an operator gets."""

    PROBE = "probe"
    GATE = "gate"
    DRAIN = "drain"
    SHED = "shed"
    RECORDER = "recorder"


class State(StrEnum):
    """What became of one need."""

    FOUND = "found"
    DIFFERENT = "different"  # something of that name is there, but not as we need it
    ABSENT = "absent"
    NOT_NEEDED = "not needed"

    @property
    def is_met(self) -> bool:
        """Whether nothing is lost."""
        return self in (State.FOUND, State.NOT_NEEDED)


class Weight(StrEnum):
    """What a part loses with an unmet need: itself, a piece that people count on, or a detail."""

    MUST = "must"
    HELPS = "helps"
    DETAIL = "detail"


class Look(NamedTuple):
    """What one file must show. All that is named must be there."""

    files: tuple[str, ...]  # where releases keep it, any one of them; paths inside the package
    owner: str = ""  # the class that has the methods and attributes
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and the arguments we give it
    begins: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and the arguments it must begin with: it is stood in for
    attributes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # names or text constants that the file's code uses
    assigned: tuple[str, ...] = ()  # attributes that the file's code sets on some object


class Way(NamedTuple):
    """One of the shapes in which releases have what is needed."""

    says: str  # how it is then used; may be empty
    looks: tuple[Look, ...]


class Need(NamedTuple):
    """One thing that plimsoll.inside relies on."""

    name: str
    purpose: str
    lost: str  # what is missing without it
    ways: tuple[Way, ...]  # the best first
    weights: Mapping[Part, Weight]
    unneeded_without: Look | None = None  # a release without this has no use for it
    unneeded_because: str = ""
    none_in: tuple[str, ...] = ()  # folders whose classes must not define what `forbidden` names
    forbidden: str = ""  # a name, or the beginning of one if it ends in _


class Answer(NamedTuple):
    """What the sources say about one need."""

    name: str
    state: State
    where: str = ""  # the file that shows it
    note: str = ""


class Verdict(NamedTuple):
    """What becomes of one part."""

    part: Part
    works: str  # yes, partly, no
    because: tuple[str, ...] = ()  # what is lost, the worst first
    details: tuple[str, ...] = ()  # what is lost and hardly missed


def judge(sources: Sources, needs: Sequence[Need]) -> tuple[Answer, ...]:
    """One answer for each need."""
    return tuple(_forbidden(need, sources) if need.forbidden else _answer(need, sources) for need in needs)


def _answer(need: Need, sources: Sources) -> Answer:
    nearest: Answer | None = None
    for way in need.ways:
        found = [_look(look, sources) for look in way.looks]
        wrong = next((inner for inner in found if not inner.state.is_met), None)
        if wrong is None:
            return Answer(need.name, State.FOUND, found[0].where, way.says)
        if nearest is None or (wrong.state is State.DIFFERENT and nearest.state is State.ABSENT):
            nearest = wrong
    if need.unneeded_without is not None and not _look(need.unneeded_without, sources).state.is_met:
        return Answer(need.name, State.NOT_NEEDED, note=need.unneeded_because)
    assert nearest is not None, f"{need.name} has no ways"
    return nearest._replace(name=need.name)


def _look(look: Look, sources: Sources) -> Answer:
    """FOUND where one of the files shows everything; else the answer of the file that shows most."""
    nearest = Answer("", State.ABSENT, look.files[0], "there is no such file")
    for path in look.files:
        text = sources.read(path)
        if text is None:
            continue
        missing, has_owner = _missing(look, text)
        if not missing:
            return Answer("", State.FOUND, path)
        state = State.DIFFERENT if has_owner else State.ABSENT
        if nearest.state is State.ABSENT:
            nearest = Answer("", state, path, missing)
    return nearest


def _missing(look: Look, text: str) -> tuple[str, bool]:
    """What is not there, and whether at least what should hold it is."""
    shape = shape_of(text)
    if shape is None:
        return "the file cannot be parsed", True
    owner = shape.classes.get(look.owner) if look.owner else None
    if look.owner and owner is None:
        return f"there is no class {look.owner}", False
    methods = owner.methods if owner is not None else shape.functions
    for name, arguments in look.methods:
        shown = f"{look.owner}.{name}" if look.owner else name
        if name not in methods:
            return f"there is no {shown}", owner is not None
        lacking = [argument for argument in arguments if argument not in methods[name]]
        if lacking and ANY not in methods[name]:
            return f"{shown} does not take {', '.join(lacking)}", True
    for name, arguments in look.begins:
        if methods.get(name, ())[: len(arguments)] != arguments:
            return f"{look.owner}.{name} does not begin with {', '.join(arguments[1:])}", True
    attributes = owner.attributes | set(owner.methods) if owner is not None else shape.assigned
    gone = [name for name in look.attributes if name not in attributes]
    if gone:
        return f"{look.owner or 'the file'} has no {', '.join(gone)}", owner is not None
    gone = [word for word in look.words if word not in shape.words] + [n for n in look.assigned if n not in shape.assigned]
    return (f"its code does not name {', '.join(gone)}", False) if gone else ("", True)


def _forbidden(need: Need, sources: Sources) -> Answer:
    """A need that something is not there."""
    is_beginning = need.forbidden.endswith("_") and not need.forbidden.startswith("__")
    for folder in need.none_in:
        for path in sources.listed(folder):
            text = sources.read(path)
            shape = shape_of(text) if text is not None and need.forbidden in text else None
            for name, inner in (shape.classes if shape is not None else {}).items():
                names = {*inner.methods, *inner.attributes}
                taken = [n for n in sorted(names) if n == need.forbidden or (is_beginning and n.startswith(need.forbidden))]
                if taken:
                    return Answer(need.name, State.DIFFERENT, path, f"{name} defines {taken[0]}")
    return Answer(need.name, State.FOUND, need.none_in[0])


def verdicts(answers: Sequence[Answer], needs: Sequence[Need]) -> tuple[Verdict, ...]:
    """What the answers make of each part."""
    states = {answer.name: answer.state for answer in answers}
    made = []
    for part in Part:
        lost: dict[Weight, list[str]] = {weight: [] for weight in Weight}
        for need in needs:
            weight = need.weights.get(part)
            if weight is not None and not states.get(need.name, State.ABSENT).is_met:
                lost[weight].append(need.lost)
        works = "no" if lost[Weight.MUST] else "partly" if lost[Weight.HELPS] else "yes"
        because = (*lost[Weight.MUST], *lost[Weight.HELPS])
        made.append(Verdict(part, works, tuple(dict.fromkeys(because)), tuple(dict.fromkeys(lost[Weight.DETAIL]))))
    return tuple(made)
