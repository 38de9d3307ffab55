"""Steps that ran out of memory and did not end the server: taken out of what may have ended it, and told as what they are.

vLLM prints the traceback of a step before containment takes it over. Which traceback belongs to a contained step is told by the
next line of containment after it: one that says "contained" or "aborted" clears it, one that says "gave up" or "cannot contain"
leaves it as vLLM means it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from plimsoll.doctor.rules.facts import FailureCase, LogFacts, gib, more_room
from plimsoll.doctor.rules.log_text import LogLine
from plimsoll.doctor.rules.out_of_memory import OomFigures, parse_oom, parse_size
from plimsoll.doctor.rules.root_cause import Symptom
from plimsoll.doctor.rules.timeline import FOLLOWING, LogTimeline
from plimsoll.doctor.words import finding, remedies, words
from plimsoll.findings import Code, Evidence, Finding, Remedy
from plimsoll.units import GIB, format_count
from plimsoll.vllm.failure_texts import Role
from plimsoll.vllm.metrics_page import Page

LEAST_TOKENS = 64  # a step of fewer serves nobody: a limit that low is no setting
ROOM = Remedy(
    "lower --gpu-memory-utilization by what was missing, at the next restart",
    "costs as much KV cache and nothing else", "--gpu-memory-utilization",
)  # fmt: skip


def contained_remedies(
    site: str, kind: str = "", *, tokens: int | None = None, room: Remedy = ROOM, has_neighbour: bool = False
) -> tuple[Remedy, ...]:
    """The changes that close this site, cheapest first; `tokens` is the size of a step that worked, `room` a computed share."""
    table = words("contained")
    found = list(remedies(table["neighbour"])) if has_neighbour else []
    if kind == "prompt_logprobs" or site == "logits":
        site = "logits"
    elif kind == "pictures" or site == "encoder":
        site = "encoder"
    elif kind == "adapter":
        site = kind
    found += remedies(table[site])
    flag, cost = "--max-num-batched-tokens", "costs time to first token on long prompts"
    if site in ("encoder", "adapter"):
        pass  # they work on whole inputs, however small the steps are
    elif tokens is None or tokens < LEAST_TOKENS:
        found.append(Remedy(f"a smaller {flag}", f"smaller steps; {cost}", flag))
    else:
        found.append(Remedy(f"{flag} {tokens}", f"steps of that size worked here; {cost}", flag, str(tokens)))
    return (*found, room)


SITES = ("forward", "logits", "sampler", "encoder", "adapter", "drafter", "unknown")
UNKNOWN_SITE = "unknown"
KINDS = ("prompt_logprobs", "pictures", "adapter")
_SPECIAL = {
    "prompt_logprobs": "a request that wants prompt_logprobs", "pictures": "a request with pictures",
    "adapter": "a request with an adapter",
}  # fmt: skip
LONGEST_WHY = 200
MOST = 2**63


class LastFailure(NamedTuple):
    """The newest contained failure; None for what is not told of it."""

    age_s: float | None = None
    site: str = UNKNOWN_SITE
    tokens: float | None = None
    requests: float | None = None
    asked_bytes: float | None = None
    free_bytes: float | None = None
    kind: str = ""  # what is special in the shape of the request that did it: one of KINDS, or nothing


class Survival(NamedTuple):
    """Containment in one server; None for what it does not say, or says in a way that cannot be."""

    armed: bool | None = None
    why: str = ""  # why it is not armed
    contained: float | None = None
    aborted: float | None = None
    recomputed_tokens: float | None = None
    stalled_s: float | None = None
    last: LastFailure | None = None
    tokens_now: float | None = None  # of a step, at most
    tokens_start: float | None = None
    sequences_now: float | None = None
    sequences_start: float | None = None
    limping: bool | None = None
    storm: bool | None = None

    @property
    def is_shrunk(self) -> bool:
        """True if its steps are known to be smaller than at the start."""
        pairs = ((self.tokens_now, self.tokens_start), (self.sequences_now, self.sequences_start))
        return any(now is not None and start is not None and now < start for now, start in pairs)


def read_survival(found: object) -> Survival | None:
    """The key as it was answered; None where there is none, or where it is no table."""
    if not isinstance(found, Mapping):
        return None
    tables = (found.get("tokens_per_step"), found.get("sequences"), found.get("last"))
    tokens, sequences, newest = (table if isinstance(table, Mapping) else {} for table in tables)
    armed, limping, storm = (
        value if isinstance(value := found.get(name), bool) else None for name in ("armed", "limping", "storm")
    )
    last = None
    if isinstance(found.get("last"), Mapping):
        names = ("age_s", "tokens", "requests", "asked_bytes", "free_bytes")
        site, kind = (value if isinstance(value := newest.get(name), str) else "" for name in ("site", "kind"))
        last = LastFailure(
            **{name: _number(newest.get(name)) for name in names}, site=site if site in SITES else UNKNOWN_SITE,
            kind=kind if kind in KINDS else "",
        )  # fmt: skip
    why = found.get("why")
    counts = {name: _number(found.get(name)) for name in ("contained", "aborted", "recomputed_tokens", "stalled_s")}
    return Survival(
        armed=armed, why=why[:LONGEST_WHY] if isinstance(why, str) else "", **counts, last=last, limping=limping, storm=storm,
        tokens_now=_number(tokens.get("now")), tokens_start=_number(tokens.get("start")),
        sequences_now=_number(sequences.get("now")), sequences_start=_number(sequences.get("start")),
    )  # fmt: skip


def _number(found: object) -> float | None:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < MOST:
        return None
    return float(found)


def last_words(last: LastFailure | None) -> str:
    """The shape of the newest failure, without anybody's text: "a step of 8,192 tokens in 48 requests, at forward"."""
    if last is None:
        return ""
    size = f"a step of {format_count(int(last.tokens))} tokens" if last.tokens is not None else "a step"
    size += f" in {last.requests:.0f} requests" if last.requests is not None and last.requests > 1 else ""
    size += f", at {last.site}" if last.site != UNKNOWN_SITE else ""
    size += f", {_SPECIAL[last.kind]}" if last.kind in _SPECIAL else ""
    if last.asked_bytes is not None:
        free = f", {gib(int(last.free_bytes))} free" if last.free_bytes is not None else ""
        size += f" (asked for {gib(int(last.asked_bytes))}{free})"
    return size


def cost_words(found: Survival) -> list[str]:
    """The cost since the server started: tokens, time, requests, and smaller steps."""
    parts = []
    if found.recomputed_tokens:
        parts.append(f"{format_count(int(found.recomputed_tokens))} tokens were computed again")
    if found.stalled_s:
        parts.append(f"streams stood still for {found.stalled_s:.1f} s")
    if found.aborted:
        parts.append(f"{found.aborted:.0f} request{' was' if found.aborted == 1 else 's were'} aborted, too large alone")
    if found.tokens_now is not None and (found.is_shrunk or found.tokens_start is None):
        before = f", {found.tokens_start:.0f} at the start" if found.tokens_start is not None else ""
        parts.append(f"steps of at most {found.tokens_now:.0f} tokens now{before}")
    return parts


# Containment (`plimsoll.inside`, PLIMSOLL_SURVIVE) writes into a server's log:
#   plimsoll: survive: contained failure 3: a step of 8192 tokens in 48 requests ran out of device memory at forward (...)
#   plimsoll: survive: aborted request cmpl-1: it ran out of device memory alone, in a step of 512 tokens at encoder (...)
# A line counts only if it begins so after vLLM's prefix and, where the log names processes, comes from the engine core: a
# request's text may quote anything, and the API server prints it.
START = "plimsoll: survive: "
CORE = "EngineCore"
LONGEST_REASON = 300
MOST_LINES = 20_000
_compiled = cache(re.compile)
_SIZE = r"\d{1,12}(?:\.\d{1,6})? (?:bytes|B|KiB|MiB|GiB|TiB)"
_SITE = rf" at (?P<site>[a-z]{{1,20}})(?: \((?:asked for (?P<asked>{_SIZE}))?(?:, )?(?:(?P<free>{_SIZE}) free)?\))?"
_CONTAINED = (
    r"contained failure (?P<number>\d{1,9}): a step of (?P<tokens>\d{1,9}) tokens? in (?P<requests>\d{1,9}) requests? "
    rf"ran out of device memory{_SITE}"
)
_LIMIT = r"steps of at most (?P<tokens>\d{1,9}) tokens and \d{1,9} sequences"
_LOST = r"; (?P<preempted>\d{1,9}) requests? preempted, (?P<recomputed>\d{1,12}) tokens? to recompute"
_ABORTED = rf"aborted request \S{{1,300}}: it ran out of device memory alone, in a step of (?P<tokens>\d{{1,9}}) tokens?{_SITE}"


class ContainedFailure(NamedTuple):
    """One contained failure, or one request that was aborted for one; None for what its line leaves out."""

    at: int  # index of its line
    site: str = UNKNOWN_SITE
    tokens: int | None = None
    requests: int | None = None
    asked: int | None = None
    free: int | None = None
    recomputed: int | None = None
    limit_tokens: int | None = None  # of a step from here on
    number: int | None = None  # as its engine core counts them
    process: str = ""


class ContainmentLine(NamedTuple):
    """A line of containment that is no failure."""

    at: int
    text: str


class ContainedLines(NamedTuple):
    """All that containment says in a log, in its order."""

    contained: tuple[ContainedFailure, ...] = ()
    aborted: tuple[ContainedFailure, ...] = ()
    armed: tuple[ContainmentLine, ...] = ()
    not_armed: tuple[ContainmentLine, ...] = ()  # the text is the reason alone
    grown: tuple[ContainedFailure, ...] = ()
    storms: tuple[ContainmentLine, ...] = ()
    given_up: tuple[ContainmentLine, ...] = ()  # also what it could not contain: vLLM ends

    def __bool__(self) -> bool:
        return any(self)

    @property
    def failures(self) -> tuple[ContainedFailure, ...]:
        """The failures that the server survived, in the order of the log."""
        return tuple(sorted((*self.contained, *self.aborted), key=lambda one: one.at))

    @property
    def total(self) -> int:
        """How many failures were contained, also those between two lines of which a huge log keeps none."""
        total = 0
        last: dict[str, int] = {}
        for one in self.contained:
            number, before = one.number or 0, last.get(one.process)
            total += 1 if before is None or number <= before else number - before
            last[one.process] = number
        return total

    @property
    def ends(self) -> list[tuple[int, bool]]:
        """Where the log tells how a failed step ended, in order: True where the server survived, False where vLLM ends."""
        return sorted([(one.at, True) for one in self.failures] + [(one.at, False) for one in self.given_up])


def read_contained(lines: Sequence[LogLine]) -> ContainedLines:
    """Everything that containment says in these lines; of lines by the API server nothing."""
    said = [(at, line) for at, line in enumerate(lines) if line.text.startswith(START)][:MOST_LINES]
    if not said:
        return ContainedLines()
    is_named = any(line.process.startswith(CORE) for line in lines)
    contained, aborted, grown = [], [], []
    told: dict[str, list[ContainmentLine]] = {"armed": [], "not armed: ": [], "storm: ": [], "gave up after ": []}
    for at, line in said:
        if not (line.process.startswith(CORE) if is_named else not line.process):
            continue
        text = line.text.removeprefix(START).strip()
        if (match := _compiled(_CONTAINED).match(text) or _compiled(_ABORTED).match(text)) is not None:
            asked, free = (parse_size(match[name]) if match[name] else None for name in ("asked", "free"))
            site = match["site"] if match["site"] in SITES else UNKNOWN_SITE
            failure = ContainedFailure(at, site, int(match["tokens"]), 1, asked, free)
            if text.startswith("aborted"):
                aborted.append(failure)
                continue
            rest = text[match.end() :]
            lost, limit = _compiled(_LOST).match(rest), _compiled(_LIMIT).search(rest)
            contained.append(failure._replace(
                requests=int(match["requests"]), number=int(match["number"]), process=line.process,
                recomputed=int(lost["recomputed"]) if lost is not None else None,
                limit_tokens=int(limit["tokens"]) if limit is not None else None,
            ))  # fmt: skip
        elif (limit := _compiled(rf"growing back: {_LIMIT}").match(text)) is not None:
            grown.append(ContainedFailure(at, limit_tokens=int(limit["tokens"])))
        elif text.startswith("cannot contain this failure: "):
            told["gave up after "].append(ContainmentLine(at, text[:LONGEST_REASON]))
        elif (start := next((start for start in told if text.startswith(start)), None)) is not None:
            is_reason = start == "not armed: "
            text = text[:LONGEST_REASON]
            told[start].append(ContainmentLine(at, text.removeprefix(start) if is_reason else text))
    armed, not_armed, storms, given_up = map(tuple, told.values())
    return ContainedLines(tuple(contained), tuple(aborted), armed, not_armed, tuple(grown), storms, given_up)


PREFIX = "plimsoll_survive_"
CONTAINED = f"{PREFIX}contained_total"


def remedies_of(found: Survival | None) -> tuple[Remedy, ...]:
    """Remedies for the newest failure, by its site and shape."""
    last = None if found is None else found.last
    if found is None or last is None:
        return contained_remedies(UNKNOWN_SITE)
    tokens = int(found.tokens_now) if found.is_shrunk and found.tokens_now is not None else None
    return contained_remedies(last.site, last.kind, tokens=tokens)


def finding_of_state(
    found: Survival, evidence: Sequence[Evidence], where: str = " since the server began",
    remedy: tuple[Remedy, ...] | None = None, *, is_alive: bool = True,
) -> Finding | None:  # fmt: skip
    """runtime.contained; None where nothing was contained, or nobody says."""
    if not found.contained and not found.aborted:
        return None
    count, what = (found.contained, "step") if found.contained else (found.aborted or 0, "request")
    fate = "the server lives" if is_alive else "the server survived that; what ended it later is told beside it"
    told = [f"{count:.0f} {what}{'' if count == 1 else 's'} ran out of device memory{where}, and {fate}"]
    told += [f"the last: {last_words(found.last)}"] if found.last else []
    told += cost_words(found) + (["it limps: far slower than before"] if found.limping else [])
    told += ["a storm: it should be drained and restarted"] if found.storm else []
    return finding("contained", evidence, "; ".join(told), first=remedies_of(found) if remedy is None else remedy)


def finding_of_page(page: Page, before: Page | None, source: str) -> Finding | None:
    """runtime.contained for a page that counts contained failures; None where it counts none."""
    totals = {name: page.total(PREFIX + name) for name in _COUNTERS}
    now = {name: value for name, value in totals.items() if value is not None and 0 <= value < math.inf}
    count = now.get("contained_total", 0.0)
    if count < 1:
        return None
    old = None if before is None else before.total(CONTAINED)
    lately = f", {count - old:.0f} of them between the two looks" if old is not None and 0 <= old <= count else ""
    found = Survival(
        contained=count, aborted=now.get("aborted_total"), recomputed_tokens=now.get("recomputed_tokens_total"),
        stalled_s=now.get("stalled_seconds_total"), tokens_now=now.get("tokens_per_step"),
        tokens_start=now.get("tokens_per_step_start"), limping=now.get("limping", 0.0) > 0, storm=now.get("storm", 0.0) > 0,
    )  # fmt: skip
    shown = Evidence(source, f"{CONTAINED} {count:.10g}", page.of(CONTAINED)[0].line)
    return finding_of_state(found, [shown], f" since the server began{lately}")


_COUNTERS = (
    "contained_total", "aborted_total", "recomputed_tokens_total", "stalled_seconds_total", "tokens_per_step",
    "tokens_per_step_start", "limping", "storm",
)  # fmt: skip


BEFORE = 2_000  # lines between a traceback and the line that clears it: a busy server prints a line a request
BEFORE_S = 120.0
AFTER = 60  # a worker writes by itself, and may be late
HEAD = 40  # lines of others between a worker's "hit an exception" and its traceback
MOST_PROOF = 6
_WORKERS = ("Worker", "VllmWorker", "RayWorker")


def without_contained(timeline: LogTimeline, said: ContainedLines) -> tuple[LogTimeline, tuple[OomFigures, ...]]:
    """The timeline without the failures that were contained, and the figures of these as torch printed them."""
    if not said.ends:
        return timeline, ()
    cleared = _cleared(timeline, said)
    if not cleared and not any(hit.text.role is Role.OUT_OF_MEMORY for hit in timeline.hits):
        return timeline, ()
    exceptions = [one._replace(warned=True) if at in cleared else one for at, one in enumerate(timeline.exceptions)]
    tracebacks = [timeline.exceptions[at] for at in cleared]
    ends = _StepEnds(timeline, said)
    hits = []
    for hit in timeline.hits:
        role, process = hit.text.role, timeline.log.lines[hit.at].process
        is_cleared = role is Role.OUT_OF_MEMORY and bool(ends.after(hit.at, process))
        if not is_cleared and role in (Role.OUT_OF_MEMORY, Role.CAUSE, Role.DEATH):
            ahead = HEAD if hit.text.name == "worker-exception" else 2
            behind = FOLLOWING if role is Role.OUT_OF_MEMORY else 0
            is_cleared = any(one.process == process and one.first - ahead <= hit.at <= one.at + behind for one in tracebacks)
        hits += [] if is_cleared else [hit]
    ooms = tuple(parse_oom(one.message) for one in tracebacks if "ried to allocate" in one.message)
    return timeline._replace(exceptions=exceptions, hits=hits), ooms


class _StepEnds:
    """Where the log tells how a failed step ended, for each process that may have failed in it."""

    def __init__(self, timeline: LogTimeline, said: ContainedLines) -> None:
        self._timeline = timeline
        self._of: dict[str, list[tuple[int, bool]]] = {"": said.ends}
        for at, is_survived in said.ends:
            self._of.setdefault(timeline.log.lines[at].process, []).append((at, is_survived))

    def after(self, at: int, process: str) -> bool | None:
        """True if the next word on a failed step says that the server survived; None where there is none near enough."""
        # A worker's failure ends in its engine core, whichever that is; of several cores each tells its own.
        of = process if process.startswith(CORE) else "" if not process or process.startswith(_WORKERS) else None
        ends, lines = self._of.get(of, []) if of is not None else [], self._timeline.log.lines
        place = bisect_right(ends, at, key=lambda end: end[0])
        if place == len(ends):
            return None
        end, is_survived = ends[place]
        began_s, ended_s = lines[at].at, lines[end].at
        is_late = began_s is not None and ended_s is not None and ended_s - began_s > BEFORE_S
        is_other_run = self._timeline.run_at(at) != self._timeline.run_at(end)
        return None if end - at > BEFORE or is_late or is_other_run else is_survived

    def before(self, first: int, process: str) -> bool:
        """True if a late worker's traceback follows a word that says so."""
        if not process.startswith(_WORKERS):
            return False
        ends = self._of[""]
        place = bisect_left(ends, first, key=lambda end: end[0]) - 1
        return place >= 0 and ends[place][1] and first - ends[place][0] <= AFTER


def _cleared(timeline: LogTimeline, said: ContainedLines) -> set[int]:
    """The places of the exceptions that belong to contained steps, with those they were raised from or led to."""
    ends = _StepEnds(timeline, said)
    deaths = [hit.at for hit in timeline.hits if hit.text.role is Role.DEATH and hit.text.name != "worker-exception"]
    found: set[int] = set()
    for place, one in enumerate(timeline.exceptions):
        if not (one.name == "OutOfMemoryError" or "ut of memory" in one.message or "ALLOC_FAILED" in one.message):
            continue
        survived = ends.after(one.at, one.process)
        if survived is None and ends.before(one.first, one.process):
            run = timeline.run_at(one.at)
            survived = not any(one.first <= at < run.end for at in deaths)
        if survived:
            found.add(place)
    for place, one in enumerate(timeline.exceptions):  # forward: a cause stands before what it led to
        if one.cause in found:
            found.add(place)
    for place in range(len(timeline.exceptions) - 1, -1, -1):
        cause = timeline.exceptions[place].cause
        if place in found and cause is not None:
            found.add(cause)
    return found


def proof_of(said: ContainedLines) -> list[int]:
    """The lines that show it: the first and the last of the failures, the first aborted requests, and a storm."""
    lines, aborted = [one.at for one in said.failures], [one.at for one in said.aborted[:2]]
    ends = (MOST_PROOF - len(aborted)) // 2
    some = lines if len(lines) <= MOST_PROOF else [*lines[:ends], *aborted, *lines[-ends:]]
    return sorted({*some, *(one.at for one in said.storms[:1])})


def finding_of_contained(
    said: ContainedLines, ooms: Sequence[OomFigures], facts: LogFacts, proof: Sequence[Evidence], *, is_alive: bool
) -> Finding:
    """runtime.contained, with what it takes to make it impossible on this server."""
    failures = said.failures
    sites = Counter(one.site for one in said.contained or said.aborted)  # an aborted request's step is counted once
    worst = max((OomFigures(tried=one.asked, free=one.free) for one in failures), key=_missing)
    told = max(ooms, key=_missing, default=worst)
    oom = (told if _missing(told) >= _missing(worst) else worst)._replace(total=told.total)
    case = FailureCase(Symptom(failures[-1].at, Code.RUNTIME_CONTAINED, 0.95, oom=oom), facts, "")
    room = more_room(case, case.missing if case.missing is not None else GIB)
    limits = [one.limit_tokens for one in said.contained if one.limit_tokens is not None]
    # A step that worked, and no fewer tokens than sequences: vLLM would not start.
    tokens = max(limits[-1], case.max_num_seqs or 0) if limits else None
    has_neighbour = any(one.has_neighbour for one in ooms)
    closed = [one.site for one in said.aborted[-1:]]  # what cost a request first
    closed += [site for site, _ in sites.most_common(2) if site not in closed]
    offers = [contained_remedies(site, tokens=tokens, room=room, has_neighbour=has_neighbour) for site in closed]
    remedy = tuple(dict.fromkeys(one for some in offers for one in some))

    newest, at = failures[-1], [f"{number} at {site}" for site, number in sites.most_common()]
    where = f" ({', '.join(at)})" if len(sites) > 1 else f" at {next(iter(sites))}"
    grown = [one.limit_tokens for one in said.grown if limits and one.at > said.contained[-1].at]
    told_of_it = Survival(
        contained=said.total, aborted=len(said.aborted), recomputed_tokens=sum(one.recomputed or 0 for one in said.contained),
        last=LastFailure(None, newest.site, newest.tokens, newest.requests, newest.asked, newest.free),
        tokens_now=next(iter([*grown[-1:], *limits[-1:]]), None), storm=bool(said.storms),
    )  # fmt: skip
    found = finding_of_state(told_of_it, proof, where, remedy, is_alive=is_alive)
    assert found is not None, "something was contained"
    return found


def _missing(oom: OomFigures) -> int:
    return -1 if oom.tried is None else max(0, oom.tried - (oom.free or 0))


def with_containment(found: Finding, said: ContainedLines, proof: Sequence[Evidence], reason: str) -> Finding:
    """The finding, with the part that containment played: it gave up, or was requested and not armed (`reason`)."""
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
