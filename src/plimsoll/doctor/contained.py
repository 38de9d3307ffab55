"""Steps that ran out of memory and did not end the server: taken out of what may have ended it, and told as what they are.

vLLM prints the traceback of a step before containment takes it over. Which traceback belongs to a contained step is told by the
next line of containment after it: one that says "contained" or "aborted" clears it, one that says "gave up" or "cannot contain"
leaves it as vLLM means it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from plimsoll.doctor.case import Case, gib, more_room
from plimsoll.doctor.complaints import Complaint
from plimsoll.doctor.contained_lines import CORE, ContainedLines, Failure
from plimsoll.doctor.contained_remedies import NOT_REMEDIES, TITLE, contained_remedies
from plimsoll.doctor.facts import LogFacts
from plimsoll.doctor.oom_text import OutOfMemory, parse_oom
from plimsoll.doctor.story import Hit, Story
from plimsoll.doctor.tracebacks import FOLLOWING, Raised
from plimsoll.domain.finding import Code, Evidence, Finding, Remedy, Severity
from plimsoll.domain.units import GIB, format_count
from plimsoll.engine.failure_texts import Role

BEFORE = 2_000  # lines between a traceback and the line that clears it: a busy server prints a line a request
BEFORE_S = 120.0
AFTER = 60  # a worker writes by itself, and may be late
HEAD = 40  # lines of others between a worker's "hit an exception" and its traceback
MOST_PROOF = 6
SURE = 0.95
_WORKERS = ("Worker", "VllmWorker", "RayWorker")


def without_contained(story: Story, said: ContainedLines) -> tuple[Story, tuple[OutOfMemory, ...]]:
    """The story without the failures that were contained, and the figures of these as torch printed them."""
    if not said.ends:
        return story, ()
    cleared = _cleared(story, said)
    if not cleared and not any(hit.text.role is Role.OUT_OF_MEMORY for hit in story.hits):
        return story, ()
    raised = [one._replace(warned=True) if at in cleared else one for at, one in enumerate(story.raised)]
    tracebacks = [story.raised[at] for at in cleared]
    ends = _Ends(story, said)
    hits = [hit for hit in story.hits if not _is_cleared(story, hit, tracebacks, ends)]
    ooms = tuple(parse_oom(one.message) for one in tracebacks if "ried to allocate" in one.message)
    return story._replace(raised=raised, hits=hits), ooms


class _Ends:
    """Where the log tells how a failed step ended, for each process that may have failed in it."""

    def __init__(self, story: Story, said: ContainedLines) -> None:
        self._story = story
        self._of: dict[str, list[tuple[int, bool]]] = {"": said.ends}
        for at, is_survived in said.ends:
            self._of.setdefault(story.log.lines[at].process, []).append((at, is_survived))

    def _ends_for(self, process: str) -> list[tuple[int, bool]]:
        # A worker's failure ends in its engine core, whichever that is; of several cores each tells its own.
        if process.startswith(CORE):
            return self._of.get(process, [])
        return self._of[""] if not process or process.startswith(_WORKERS) else []

    def after(self, at: int, process: str) -> bool | None:
        """Whether the next word on a failed step says that the server survived; None where there is none near enough."""
        ends, lines = self._ends_for(process), self._story.log.lines
        place = bisect_right(ends, at, key=lambda end: end[0])
        if place == len(ends):
            return None
        end, is_survived = ends[place]
        began_s, ended_s = lines[at].at, lines[end].at
        is_late = began_s is not None and ended_s is not None and ended_s - began_s > BEFORE_S
        is_other_life = self._story.life_at(at) != self._story.life_at(end)
        return None if end - at > BEFORE or is_late or is_other_life else is_survived

    def before(self, first: int, process: str) -> bool:
        """Whether a late worker's traceback follows a word that says so."""
        if not process.startswith(_WORKERS):
            return False
        ends = self._of[""]
        place = bisect_left(ends, first, key=lambda end: end[0]) - 1
        return place >= 0 and ends[place][1] and first - ends[place][0] <= AFTER


def _cleared(story: Story, said: ContainedLines) -> set[int]:
    """The places of the exceptions that belong to contained steps, with those they were raised from or led to."""
    ends = _Ends(story, said)
    deaths = [hit.at for hit in story.hits if hit.text.role is Role.DEATH and hit.text.name != "worker-exception"]
    found: set[int] = set()
    for place, one in enumerate(story.raised):
        if not _is_memory(one):
            continue
        survived = ends.after(one.at, one.process)
        if survived is None and ends.before(one.first, one.process):
            life = story.life_at(one.at)
            survived = not any(one.first <= at < life.end for at in deaths)
        if survived:
            found.add(place)
    for place, one in enumerate(story.raised):  # forward: a cause stands before what it led to
        if one.cause in found:
            found.add(place)
    for place in range(len(story.raised) - 1, -1, -1):
        cause = story.raised[place].cause
        if place in found and cause is not None:
            found.add(cause)
    return found


def _is_memory(one: Raised) -> bool:
    return one.name == "OutOfMemoryError" or "ut of memory" in one.message or "ALLOC_FAILED" in one.message


def _is_cleared(story: Story, hit: Hit, tracebacks: Sequence[Raised], ends: _Ends) -> bool:
    """Whether a telling text belongs to a contained step."""
    role, process = hit.text.role, story.log.lines[hit.at].process
    if role is Role.OUT_OF_MEMORY and ends.after(hit.at, process):
        return True
    if role not in (Role.OUT_OF_MEMORY, Role.CAUSE, Role.DEATH):
        return False
    ahead = HEAD if hit.text.name == "worker-exception" else 2
    behind = FOLLOWING if role is Role.OUT_OF_MEMORY else 0
    return any(one.process == process and one.first - ahead <= hit.at <= one.at + behind for one in tracebacks)


def proof_of(said: ContainedLines) -> list[int]:
    """The lines that show it: the first and the last of the failures, the first aborted requests, and a storm."""
    lines, aborted = [one.at for one in said.failures], [one.at for one in said.aborted[:2]]
    ends = (MOST_PROOF - len(aborted)) // 2
    some = lines if len(lines) <= MOST_PROOF else [*lines[:ends], *aborted, *lines[-ends:]]
    return sorted({*some, *(one.at for one in said.storms[:1])})


def finding_of_contained(
    said: ContainedLines, ooms: Sequence[OutOfMemory], facts: LogFacts, proof: Sequence[Evidence], *, is_alive: bool
) -> Finding:
    """runtime.contained, with what it takes to make it impossible on this server."""
    failures = said.failures
    sites = Counter(one.site for one in said.contained or said.aborted)  # an aborted request's step is counted once
    worst = max((_figures(one) for one in failures), key=_missing)
    told = max(ooms, key=_missing, default=worst)
    oom = (told if _missing(told) >= _missing(worst) else worst)._replace(total=told.total)
    case = Case(Complaint(failures[-1].at, Code.RUNTIME_CONTAINED, SURE, oom=oom), facts, "")
    room = more_room(case, case.missing if case.missing is not None else GIB)
    tokens, has_neighbour = _worked(said, case.max_num_seqs), any(one.has_neighbour for one in ooms)
    closed = [one.site for one in said.aborted[-1:]]  # what cost a request first
    closed += [site for site, _ in sites.most_common(2) if site not in closed]
    remedy = tuple(
        dict.fromkeys(
            one for site in closed for one in contained_remedies(site, tokens=tokens, room=room, has_neighbour=has_neighbour)
        )
    )
    lives = "The server lives" if is_alive else "The server survived that; what ended it later is told beside it"
    because = f"{'; '.join(_because(said, sites, worst))}. {lives}"
    return Finding(Code.RUNTIME_CONTAINED, Severity.WARNING, SURE, TITLE, because, tuple(proof), remedy, NOT_REMEDIES)


def _figures(one: Failure) -> OutOfMemory:
    return OutOfMemory(tried=one.asked, free=one.free)


def _missing(oom: OutOfMemory) -> int:
    return -1 if oom.tried is None else max(0, oom.tried - (oom.free or 0))


def _worked(said: ContainedLines, max_num_seqs: int | None) -> int | None:
    """The tokens of a step after the last contained failure, and no fewer than sequences: vLLM would not start."""
    limits = [one.limit_tokens for one in said.contained if one.limit_tokens is not None]
    return max(limits[-1], max_num_seqs or 0) if limits else None


def _because(said: ContainedLines, sites: Counter[str], worst: OutOfMemory) -> list[str]:
    count, aborted = said.total, len(said.aborted)
    what = ("1 step" if count == 1 else f"{count} steps") if count else ("1 request" if aborted == 1 else f"{aborted} requests")
    is_one = len(sites) == 1
    about = [] if is_one else [", ".join(f"{number} at {site}" for site, number in sites.most_common())]
    largest = max(said.failures, key=lambda one: one.tokens or 0)
    if largest.tokens is not None:
        of = f" in {largest.requests} requests" if largest.requests is not None and largest.requests > 1 else ""
        about.append(f"{'' if count == 1 else 'the largest of '}{format_count(largest.tokens)} tokens{of}")
    if worst.tried is not None:
        about.append(f"asked for {gib(worst.tried)}" + (f", {gib(worst.free)} free" if worst.free is not None else ""))
    parts = [f"{what} ran out of device memory{f' at {next(iter(sites))}' if is_one else ''} ({'; '.join(about)})"]
    again = sum(one.recomputed or 0 for one in said.contained)
    parts += [f"their requests were computed again, {format_count(again)} tokens"] if again else []
    limits = [one.limit_tokens for one in said.contained if one.limit_tokens is not None]
    if limits:
        grown = [one.limit_tokens for one in said.grown if one.at > said.contained[-1].at and one.limit_tokens is not None]
        back = f" and grew back to {format_count(grown[-1])}" if grown else ""
        parts.append(f"steps shrank to at most {format_count(min(limits))} tokens{back}")
    parts += [f"{aborted} request{'s were' if aborted != 1 else ' was'} aborted, too large alone"] if aborted else []
    parts += ["containment itself says that this server should be drained and restarted"] if said.storms else []
    return parts


def with_containment(found: Finding, said: ContainedLines, proof: Sequence[Evidence], reason: str) -> Finding:
    """What ended a server, with what containment had to do with it: it gave up, or was asked for and not armed (`reason`)."""
    if said.given_up:
        ended = said.given_up[-1].text.partition("; ")[0]
        return found._replace(because=f"{found.because}. Containment {ended}", evidence=(*found.evidence, *proof))
    if not reason or said.armed:
        return found
    asked = Remedy(
        f"arm containment: PLIMSOLL_SURVIVE was set, and it was not armed: {reason}",
        "armed, a step that runs out of memory costs a moment and not the server",
    )
    return found._replace(remedy=(*found.remedy, asked))
