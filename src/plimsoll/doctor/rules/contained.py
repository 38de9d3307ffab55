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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from plimsoll.doctor.rules.facts import FailureCase, LogFacts, gib, more_room
from plimsoll.doctor.rules.log_text import LogLine
from plimsoll.doctor.rules.root_cause import OomFigures, Symptom, parse_oom, parse_size
from plimsoll.doctor.rules.timeline import FOLLOWING, Hit, LoggedException, LogTimeline
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity
from plimsoll.units import GIB, MIB, format_count, format_gib
from plimsoll.vllm.failure_texts import Role
from plimsoll.vllm.metrics_page import Page

TITLE = "steps ran out of GPU memory, and the server survived them"
LEAST_TOKENS = 64  # a step of fewer serves nobody: a limit that low is no setting
ROOM = Remedy(
    "lower --gpu-memory-utilization by what was missing, at the next restart",
    "costs as much KV cache and nothing else", "--gpu-memory-utilization",
)  # fmt: skip
NEIGHBOUR = Remedy(
    "move the other process to another GPU, or bound its memory",
    "vLLM keeps no reserve for neighbours: what they take is missing here",
)
CERTIFY = Remedy(
    "plimsoll plan --certify --table FILE -- vllm serve ..., then PLIMSOLL_ADMIT=certified and PLIMSOLL_CERTIFICATE=FILE",
    "the certificate lists the kinds of request that exceed the card, and the door refuses those alone",
)
_LOGPROBS = Remedy(
    "a smaller --max-logprobs; 0 refuses all but prompt_logprobs 0",
    "log-probabilities of a prompt need a row of the whole vocabulary for each of its tokens", "--max-logprobs",
)  # fmt: skip
_PIXELS = Remedy(
    "--mm-processor-kwargs '{\"max_pixels\": 1003520}'",
    "smaller pictures, where the model's processor takes it",
    "--mm-processor-kwargs",
)
_PICTURES = Remedy("--limit-mm-per-prompt '{\"image\": 1}'", "fewer pictures a request", "--limit-mm-per-prompt")
_LORAS = Remedy("a smaller --max-loras", "each adapter's slot is kept on the GPU", "--max-loras")
_RANK = Remedy("--max-lora-rank N, the rank that your adapters really have", "slots are sized by it", "--max-lora-rank")
_SEQUENCES = Remedy("a smaller --max-num-seqs", "fewer rows of the vocabulary at once", "--max-num-seqs")
NOT_REMEDIES = (
    "a restart with the same settings: the same request does it again",
    "a HIGHER --gpu-memory-utilization: it takes room from exactly what failed",
    "resetting or switching off the prefix cache: it lies inside the KV cache, whose size never changes",
    "emptying torch's cache by hand: that was done before the step was tried again",
)


def contained_remedies(
    site: str, kind: str = "", *, tokens: int | None = None, room: Remedy = ROOM, has_neighbour: bool = False
) -> tuple[Remedy, ...]:
    """The changes that close this site, cheapest first; `tokens` is the size of a step that worked, `room` a computed share."""
    return (*((NEIGHBOUR,) if has_neighbour else ()), *_of_site(site, kind, tokens), room)


def _of_site(site: str, kind: str, tokens: int | None) -> Iterator[Remedy]:
    if kind == "prompt_logprobs" or site == "logits":
        yield from (CERTIFY, _LOGPROBS)
    elif site == "encoder" or kind == "pictures":
        yield from (_PIXELS, _PICTURES, CERTIFY)
        return  # the encoder works on whole inputs, however small the steps are
    elif site == "adapter" or kind == "adapter":
        yield from (_LORAS, _RANK)
        return
    elif site in ("sampler", "drafter"):
        yield _SEQUENCES
    flag, cost = "--max-num-batched-tokens", "costs time to first token on long prompts"
    if tokens is None or tokens < LEAST_TOKENS:
        yield Remedy(f"a smaller {flag}", f"smaller steps; {cost}", flag)
    else:
        yield Remedy(f"{flag} {tokens}", f"steps of that size worked here; {cost}", flag, str(tokens))


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
    tables = (found.get("tokens_per_step"), found.get("sequences"))
    tokens, sequences = (table if isinstance(table, Mapping) else {} for table in tables)
    why = found.get("why")
    return Survival(
        armed=_yes_or_no(found.get("armed")), why=why[:LONGEST_WHY] if isinstance(why, str) else "",
        contained=_number(found.get("contained")), aborted=_number(found.get("aborted")),
        recomputed_tokens=_number(found.get("recomputed_tokens")), stalled_s=_number(found.get("stalled_s")),
        last=_last(found.get("last")), tokens_now=_number(tokens.get("now")), tokens_start=_number(tokens.get("start")),
        sequences_now=_number(sequences.get("now")), sequences_start=_number(sequences.get("start")),
        limping=_yes_or_no(found.get("limping")), storm=_yes_or_no(found.get("storm")),
    )  # fmt: skip


def _last(found: object) -> LastFailure | None:
    if not isinstance(found, Mapping):
        return None
    site, kind = found.get("site"), found.get("kind")
    return LastFailure(
        age_s=_number(found.get("age_s")), site=site if isinstance(site, str) and site in SITES else UNKNOWN_SITE,
        tokens=_number(found.get("tokens")), requests=_number(found.get("requests")),
        asked_bytes=_number(found.get("asked_bytes")), free_bytes=_number(found.get("free_bytes")),
        kind=kind if isinstance(kind, str) and kind in KINDS else "",
    )  # fmt: skip


def _yes_or_no(found: object) -> bool | None:
    return found if isinstance(found, bool) else None


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
        free = f", {_size(last.free_bytes)} free" if last.free_bytes is not None else ""
        size += f" (asked for {_size(last.asked_bytes)}{free})"
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
    if found.is_shrunk and found.tokens_now is not None and found.tokens_start is not None:
        parts.append(f"steps of at most {found.tokens_now:.0f} tokens now, {found.tokens_start:.0f} at the start")
    return parts


def _size(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if MIB <= size < GIB else format_gib(int(size))


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
    texts = [
        (at, line.text.removeprefix(START).strip())
        for at, line in said
        if (line.process.startswith(CORE) if is_named else not line.process)
    ]
    return ContainedLines(
        contained=tuple(
            found._replace(process=lines[at].process) for at, text in texts if (found := _contained(at, text)) is not None
        ),
        aborted=tuple(
            _failure(at, match)._replace(requests=1)
            for at, text in texts
            if (match := _compiled(_ABORTED).match(text)) is not None
        ),
        armed=_words(texts, "armed"),
        not_armed=tuple(one._replace(text=one.text.removeprefix(_NOT_ARMED)) for one in _words(texts, _NOT_ARMED)),
        grown=tuple(
            ContainedFailure(at, limit_tokens=int(limit["tokens"]))
            for at, text in texts
            if (limit := _compiled(rf"growing back: {_LIMIT}").match(text)) is not None
        ),
        storms=_words(texts, "storm: "),
        given_up=_words(texts, "gave up after ", "cannot contain this failure: "),
    )


_NOT_ARMED = "not armed: "


def _words(texts: Sequence[tuple[int, str]], *starts: str) -> tuple[ContainmentLine, ...]:
    return tuple(ContainmentLine(at, text[:LONGEST_REASON]) for at, text in texts if text.startswith(starts))


def _contained(at: int, text: str) -> ContainedFailure | None:
    match = _compiled(_CONTAINED).match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    found = _failure(at, match)._replace(requests=int(match["requests"]), number=int(match["number"]))
    if (lost := _compiled(_LOST).match(rest)) is not None:
        found = found._replace(recomputed=int(lost["recomputed"]))
    if (limit := _compiled(_LIMIT).search(rest)) is not None:
        found = found._replace(limit_tokens=int(limit["tokens"]))
    return found


def _failure(at: int, match: re.Match[str]) -> ContainedFailure:
    site = match["site"]
    return ContainedFailure(
        at,
        site if site in SITES else UNKNOWN_SITE,
        int(match["tokens"]),
        asked=parse_size(match["asked"]) if match["asked"] else None,
        free=parse_size(match["free"]) if match["free"] else None,
    )


PREFIX = "plimsoll_survive_"
CONTAINED = f"{PREFIX}contained_total"


def remedies_of(found: Survival | None) -> tuple[Remedy, ...]:
    """Remedies for the newest failure, by its site and shape."""
    last = None if found is None else found.last
    if found is None or last is None:
        return contained_remedies(UNKNOWN_SITE)
    tokens = int(found.tokens_now) if found.is_shrunk and found.tokens_now is not None else None
    return contained_remedies(last.site, last.kind, tokens=tokens)


def finding_of_state(found: Survival, evidence: tuple[Evidence, ...]) -> Finding | None:
    """runtime.contained for a saved state; None where nothing was contained, or nobody says."""
    if not found.contained and not found.aborted:
        return None
    count = found.contained or 0
    first = f"{count:.0f} step{'' if count == 1 else 's'} ran out of device memory since the server began, and it lives"
    last = last_words(found.last)
    state = ["it limps: far slower than before"] if found.limping else []
    state += ["a storm: it should be drained and restarted"] if found.storm else []
    because = "; ".join([first, *([f"the last: {last}"] if last else []), *cost_words(found), *state])
    return Finding(
        Code.RUNTIME_CONTAINED, Severity.WARNING, 0.95, TITLE, because, evidence, remedies_of(found), NOT_REMEDIES
    )  # fmt: skip


def finding_of_page(page: Page, before: Page | None, source: str) -> Finding | None:
    """runtime.contained for a page that counts contained failures; None where it counts none."""
    now = {name: value for name in _COUNTERS if (value := _total(page, name)) is not None}
    count = now.get("contained_total", 0.0)
    if count < 1:
        return None
    old = None if before is None else _total(before, "contained_total")
    lately = "" if old is None or old > count else f", {count - old:.0f} of them between the two looks"
    found = Survival(
        contained=count, aborted=now.get("aborted_total"), recomputed_tokens=now.get("recomputed_tokens_total"),
        stalled_s=now.get("stalled_seconds_total"), tokens_now=now.get("tokens_per_step"),
        tokens_start=now.get("tokens_per_step_start"), limping=now.get("limping", 0.0) > 0, storm=now.get("storm", 0.0) > 0,
    )  # fmt: skip
    shown = page.of(CONTAINED)[0]
    finding = finding_of_state(found, (Evidence(source, f"{CONTAINED} {count:.10g}", shown.line),))
    assert finding is not None, "something was contained"
    return finding._replace(because=finding.because.replace(" since the server began", f" since the server began{lately}", 1))


_COUNTERS = (
    "contained_total", "aborted_total", "recomputed_tokens_total", "stalled_seconds_total", "tokens_per_step",
    "tokens_per_step_start", "limping", "storm",
)  # fmt: skip


def _total(page: Page, name: str) -> float | None:
    value = page.total(PREFIX + name)
    return value if value is not None and 0 <= value < math.inf else None


BEFORE = 2_000  # lines between a traceback and the line that clears it: a busy server prints a line a request
BEFORE_S = 120.0
AFTER = 60  # a worker writes by itself, and may be late
HEAD = 40  # lines of others between a worker's "hit an exception" and its traceback
MOST_PROOF = 6
SURE = 0.95
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
    hits = [hit for hit in timeline.hits if not _is_cleared(timeline, hit, tracebacks, ends)]
    ooms = tuple(parse_oom(one.message) for one in tracebacks if "ried to allocate" in one.message)
    return timeline._replace(exceptions=exceptions, hits=hits), ooms


class _StepEnds:
    """Where the log tells how a failed step ended, for each process that may have failed in it."""

    def __init__(self, timeline: LogTimeline, said: ContainedLines) -> None:
        self._timeline = timeline
        self._of: dict[str, list[tuple[int, bool]]] = {"": said.ends}
        for at, is_survived in said.ends:
            self._of.setdefault(timeline.log.lines[at].process, []).append((at, is_survived))

    def _ends_for(self, process: str) -> list[tuple[int, bool]]:
        # A worker's failure ends in its engine core, whichever that is; of several cores each tells its own.
        if process.startswith(CORE):
            return self._of.get(process, [])
        return self._of[""] if not process or process.startswith(_WORKERS) else []

    def after(self, at: int, process: str) -> bool | None:
        """True if the next word on a failed step says that the server survived; None where there is none near enough."""
        ends, lines = self._ends_for(process), self._timeline.log.lines
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


def _is_cleared(timeline: LogTimeline, hit: Hit, tracebacks: Sequence[LoggedException], ends: _StepEnds) -> bool:
    """True if a telling text belongs to a contained step."""
    role, process = hit.text.role, timeline.log.lines[hit.at].process
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
    said: ContainedLines, ooms: Sequence[OomFigures], facts: LogFacts, proof: Sequence[Evidence], *, is_alive: bool
) -> Finding:
    """runtime.contained, with what it takes to make it impossible on this server."""
    failures = said.failures
    sites = Counter(one.site for one in said.contained or said.aborted)  # an aborted request's step is counted once
    worst = max((OomFigures(tried=one.asked, free=one.free) for one in failures), key=_missing)
    told = max(ooms, key=_missing, default=worst)
    oom = (told if _missing(told) >= _missing(worst) else worst)._replace(total=told.total)
    case = FailureCase(Symptom(failures[-1].at, Code.RUNTIME_CONTAINED, SURE, oom=oom), facts, "")
    room = more_room(case, case.missing if case.missing is not None else GIB)
    tokens, has_neighbour = _worked(said, case.max_num_seqs), any(one.has_neighbour for one in ooms)
    closed = [one.site for one in said.aborted[-1:]]  # what cost a request first
    closed += [site for site, _ in sites.most_common(2) if site not in closed]
    remedy = tuple(
        dict.fromkeys(
            one for site in closed for one in contained_remedies(site, tokens=tokens, room=room, has_neighbour=has_neighbour)
        )
    )
    outcome = "The server lives" if is_alive else "The server survived that; what ended it later is told beside it"
    because = f"{'; '.join(_because(said, sites, worst))}. {outcome}"
    return Finding(Code.RUNTIME_CONTAINED, Severity.WARNING, SURE, TITLE, because, tuple(proof), remedy, NOT_REMEDIES)


def _missing(oom: OomFigures) -> int:
    return -1 if oom.tried is None else max(0, oom.tried - (oom.free or 0))


def _worked(said: ContainedLines, max_num_seqs: int | None) -> int | None:
    """The tokens of a step after the last contained failure, and no fewer than sequences: vLLM would not start."""
    limits = [one.limit_tokens for one in said.contained if one.limit_tokens is not None]
    return max(limits[-1], max_num_seqs or 0) if limits else None


def _because(said: ContainedLines, sites: Counter[str], worst: OomFigures) -> list[str]:
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
