"""Facts that a log states about its server; what is absent is unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from plimsoll.doctor.rules.log_text import LogLine
from plimsoll.doctor.rules.out_of_memory import OomFigures
from plimsoll.doctor.rules.root_cause import Symptom
from plimsoll.doctor.rules.timeline import LogTimeline, ServerProgress, ServerRun, present
from plimsoll.doctor.words import words
from plimsoll.errors import BadInput
from plimsoll.findings import Code, Finding, Remedy
from plimsoll.redaction import REDACTED, redact_value
from plimsoll.units import GIB, MIB, format_gib
from plimsoll.vllm.failure_texts import PLACED
from plimsoll.vllm.flags import history_of
from plimsoll.vllm.log_lines import Measured, measured_of, needles
from plimsoll.vllm.versions import Behaviour, covers, engine_named, plain_version, shared_span, spans_of, whole_span

if TYPE_CHECKING:
    from plimsoll.plan.findings import Advice  # it brings the whole ledger, which few logs need

LONGEST_NAME = 64
LONGEST_VALUE = 400
MOST_FLAGS = 200
_SETTINGS = words("names")["settings"]
_MARKS = ("non-default args: {", "args: Namespace(", "with config: ")


@lru_cache(maxsize=8)  # every worker prints the same line
def flags_of(text: str) -> Mapping[str, str]:
    """Name to value as printed, from one line; empty where the line is another one."""
    for mark in _MARKS:
        at = text.find(mark)
        if at < 0:
            continue
        inner = text[at + len(mark) :]
        pairs: Iterable[tuple[str, str]]
        if mark.startswith("non-default"):
            pairs = ((name.strip("'\""), value) for name, value in _split(inner, ":"))
        elif mark.startswith("args"):
            pairs = ((name, value) for name, value in _split(inner, "=") if name in _SETTINGS["telling"] and value != "None")
        else:
            # `Initializing an LLM engine with config: model='...', max_seq_len=8192, ...`: what was in force, not asked for.
            known = _SETTINGS["in_force"]
            in_force = ((known[name], value) for name, value in _split(inner, "=") if name in known)
            pairs = ((name, value) for name, value in in_force if value not in ("None", "auto", "False"))
        return {
            name: _shown(name, value)
            for name, value in islice(pairs, MOST_FLAGS)
            if len(name) <= LONGEST_NAME and name.isidentifier()
        }
    return {}


def _split(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The pairs at the outermost level; quotes and brackets inside a value are kept together."""
    depth, quote, start = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>" and depth:
            depth -= 1
        elif (letter == "," and depth == 0) or letter in ")]}":
            name, found, value = text[start:at].partition(separator)
            if found and name.strip():
                yield name.strip(), value.strip()
            start = at + 1
            if letter != ",":
                return
    name, found, value = text[start:].partition(separator)
    if found and name.strip() and not quote and depth == 0:
        yield name.strip(), value.strip()


def _shown(name: str, value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    value = redact_value(name, value)
    return value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "..."


def without_values(text: str) -> str:
    """The refused flags without their values: a secret may stand behind a mistyped flag."""
    head, mark, words = text.partition("unrecognized arguments:")
    flags = [word.partition("=")[0] + (" ..." if "=" in word else "") for word in words.split() if word.startswith("-")]
    return f"{head}{mark} {' '.join(flags) or '...'}" if mark else text


def command_words(flags: Mapping[str, str]) -> list[str] | None:
    """The flags as a command `plan` understands; None where no model is named. Values that are no plain word are left out."""
    model = flags.get("model") or flags.get("model_tag")
    if not model or model.startswith("-") or not model.isprintable() or REDACTED in model:
        return None
    command = ["vllm", "serve", model]
    for name, value in flags.items():
        if name in _SETTINGS["not_planned"]:
            continue
        flag = "--" + name.replace("_", "-")
        if value == "True":
            command.append(flag)
        elif value == "False":
            command.append("--no-" + name.replace("_", "-"))
        elif value not in ("None", "") and not any(letter in value for letter in "{[<(\n\0") and REDACTED not in value:
            command += [flag, value]
    return command


class Explanation(NamedTuple):
    """A computed reason and remedies; title, further remedies and what does not help stand in data/causes.yaml."""

    because: str = ""  # or as the row has it
    remedy: Sequence[Remedy] = ()
    row: str = ""  # of that table, where it is not the code's own
    useless: Sequence[str] = ()  # what does not help by these figures
    table: Sequence[Mapping[str, str]] | None = None  # remedies instead of the row's


def setting(flag: str, value: object, why: str) -> Remedy:
    """A remedy that is one flag with its value."""
    return Remedy(f"{flag} {value}", why, flag, str(value))


def unique(remedies: Iterable[Remedy]) -> list[Remedy]:
    """The first offer for each flag; offers without a value by what they say."""
    kept: dict[str, Remedy] = {}
    for one in remedies:
        kept.setdefault(one.flag if one.flag and one.value else one.do, one)
    return list(kept.values())


_VERSION = r"(?:LLM engine \(v|API server version |vLLM version:? |[█▀▄] {1,4}version )([0-9][^)\s,]{1,60})"
_SCHEDULER = r"(?:Dumping scheduler stats: )?SchedulerStats\((.{0,600})"
_FIGURE = r"\b(num_running_reqs|num_waiting_reqs|kv_cache_usage|gpu_cache_usage|step_counter)=([\d.]{1,24})"
_EXIT = r"(?:died unexpectedly|died)[^(\n]{0,40}\(?,? ?exit ?code:? ?(-?\d{1,5})"
_GPU_NAME = r"\b(?:device_name=|GPU name: |Using device: )'?((?:NVIDIA|AMD|Tesla|GeForce|Instinct)[\w .\-]{2,60})"


class LogFacts(NamedTuple):
    """Facts about the server from its own log."""

    version: str | None
    model: str | None
    gpu_name: str | None
    flags: Mapping[str, str]
    measured: Measured
    scheduler: Mapping[str, float]  # at its death
    worker_exit_code: int | None
    progress: ServerProgress
    releases: tuple[str, str] | None = None  # the first and the last it can be, where no version is printed
    traits: frozenset[str] = frozenset()  # of the machine: rocm, tpu, xpu, npu, hpu, cpu, wsl, mig, unified
    cards: int | None = None  # as many as the log says there are

    @property
    def span(self) -> tuple[str, str] | None:
        """The releases that it can be."""
        return (self.version, self.version) if self.version else self.releases


_UNIFIED_GIB = (119.0, 122.5)  # a GB10 shows this much; no card of its own memory does
_CARDS = r"number of available GPUs \((\d{1,4})\)|total number of available GPUs .{0,40}?(\d{1,4})\b|GPU count: (\d{1,4})"


def _releases(lines: Sequence[LogLine]) -> tuple[str, str] | None:
    """The releases that have these records at the lines of their source that the log shows; None where none or no one fits."""
    keys = {f"{line.place} {words}" for line in lines if line.place for words in PLACED if words in line.text}
    spans = [whole_span((span.first, span.last) for span in some) for key in keys if (some := spans_of("log_places", key))]
    return shared_span(spans) if spans else None


def role_of(process: str) -> str:
    """The part that a process plays in the server, in words: "worker (pipeline stage 1, tensor-parallel rank 0)"."""
    names = words("names")["roles"]
    for role, pattern in names["patterns"]:
        if (match := re.match(pattern, process)) is not None:
            parts = [f"{names['parts'][name]} {value}" for name, value in match.groupdict().items() if value is not None]
            return f"{role} ({', '.join(parts)})" if parts else role
    return "process"


def facts_of(timeline: LogTimeline, run: ServerRun) -> LogFacts:
    """The facts of one life of the server."""
    lines = timeline.log.lines[run.first : run.end]
    flags: dict[str, str] = {}
    scheduler: dict[str, float] = {}
    version = gpu = exit_code = None
    for line in lines:
        text = line.text
        if "args: " in text or "with config: " in text:
            found = flags_of(text)
            flags = {**found, **flags} if "with config: " in text else {**flags, **found}
        if version is None and ("version " in text or "engine (v" in text):
            match = re.search(_VERSION, text)
            version = plain_version(match[1]) if match is not None else None
        if gpu is None and ("device_name=" in text or "GPU name" in text or "Using device" in text):
            match = re.search(_GPU_NAME, text)
            gpu = match[1].removesuffix(".json").replace("_", " ").strip() if match else None
        if "SchedulerStats(" in text and (match := re.search(_SCHEDULER, text)):
            pairs = [(name, value) for name, value in re.findall(_FIGURE, match[1]) if value.count(".") <= 1]
            scheduler = {name: float(value) for name, value in pairs if value.strip(".")} or scheduler
        if "Failed core proc" in text and (match := re.search(r"proc\(s\): \{.{0,60}: (-\d{1,2})\b", text)):
            exit_code = int(match[1])
        if "exit code" in text and "died" in text:
            match = re.search(_EXIT, text)
            exit_code = int(match[1]) if match else exit_code
    known = [needle.decode() for needle in needles()]
    telling = (line for line in lines if any(needle in line.text for needle in known))
    who = ((f"({line.process}) " if line.process else "", line.text) for line in telling)
    measured = measured_of((name + text).encode("utf-8", "replace") for name, text in who)
    model, version = flags.get("model") or flags.get("model_tag"), version or measured.release
    machines = words("machines")
    seen = present(lines, [word for machine in machines.values() for word in machine["words"]])
    traits = {trait for trait, machine in machines.items() if seen & set(machine["words"])}
    if measured.total_bytes is not None and _UNIFIED_GIB[0] <= measured.total_bytes / GIB <= _UNIFIED_GIB[1]:
        traits.add("unified")
    cards = next((int(next(filter(None, match.groups()))) for line in lines if "GPU" in line.text
                  and (match := re.search(_CARDS, line.text)) is not None), None)  # fmt: skip
    return LogFacts(
        version, model, gpu, flags, measured, scheduler, exit_code, timeline.progress_at(run.end),
        None if version else _releases(lines), frozenset(traits), cards,
    )  # fmt: skip


def oom_facts(oom: OomFigures) -> dict[str, object]:
    """The parsed figures of an allocation that failed, for JSON."""
    return {
        "tried_bytes": oom.tried, "total_bytes": oom.total, "free_bytes": oom.free, "gpu": oom.gpu,
        "allocated_bytes": oom.allocated, "private_pools_bytes": oom.private,
        "reserved_unallocated_bytes": oom.reserved_unallocated, "this_process_bytes": oom.this_process,
        "processes": [{"pid": pid, "bytes": size} for pid, size in oom.processes],
        "others_bytes": oom.others if oom.own is not None else None,
    }  # fmt: skip


POSITIVE = r"(\d{1,9}(?:\.\d{1,9})?)"
FREE_OF_TOTAL = rf"\({POSITIVE}/{POSITIVE} GiB\) on "  # as vLLM's check at the start prints it
MARGIN_BYTES = GIB // 4
LEAST_CACHE_BYTES = GIB // 4  # less is no cache to serve from
BY_HAND = "kv_cache_memory_bytes"


EXPANDABLE = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "lets torch use the gaps it holds; from 0.21 refused together with a KV connector",
)
NOT_EXPANDABLE = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
    "WSL2's driver may fail to map segments that grow; others have started so",
)


class PlanFigures(NamedTuple):
    """The plan of the command that failed."""

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    slack_bytes: int | None = None
    total_bytes: int | None = None
    requested_bytes: int | None = None
    vocab_size: int | None = None
    advice: tuple[Advice, ...] = ()


class FailureCase(NamedTuple):
    """The failure, its figures and the plan, any of which may be missing."""

    symptom: Symptom
    facts: LogFacts
    line: str  # the text of the line that names it, with the lines that belong to it
    plan: PlanFigures | None = None

    @property
    def oom(self) -> OomFigures:
        """The figures of the allocation that failed; empty where there are none."""
        return self.symptom.oom or OomFigures()

    @property
    def total(self) -> int | None:
        """The card's memory as vLLM sees it."""
        return self.oom.total or self.facts.measured.total_bytes or (self.plan.total_bytes if self.plan else None)

    @property
    def utilization(self) -> float | None:
        """The share of the card that was asked for; the release's default where none was given."""
        given = self.facts.flags.get("gpu_memory_utilization")
        if given is not None:
            try:
                value = float(given)
            except ValueError:
                return None
            return value if 0 < value <= 1 else None
        if self.facts.measured.utilization is not None:
            return self.facts.measured.utilization
        try:  # or vLLM's default
            return 0.92 if Behaviour.UTILIZATION_092.is_in(self.facts.version or "") else 0.9
        except ValueError:
            return None

    def number(self, flag: str) -> int | None:
        """A flag's value where it is a plain number."""
        value = self.facts.flags.get(flag, "")
        return int(value) if value.isdecimal() and len(value) < 16 else None

    @property
    def max_num_seqs(self) -> int | None:
        """As given, or as the log says."""
        return self.number("max_num_seqs") or self.facts.measured.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int | None:
        """As given, or as the log says."""
        return self.number("max_num_batched_tokens") or self.facts.measured.max_num_batched_tokens

    @property
    def parallel(self) -> int:
        """Over how many GPUs each layer was spread."""
        return max(self.number("tensor_parallel_size") or 1, self.facts.measured.tensor_parallel or 1)

    @property
    def missing(self) -> int | None:
        """How much more was needed than was free, where the message states both."""
        if self.oom.tried is None or self.oom.free is None:
            return None
        return max(0, self.oom.tried - self.oom.free)

    def has(self, behaviour: Behaviour) -> bool | None:
        """True if the version that ran does so; None where it is not known, or the releases it can be differ."""
        try:
            answers = {behaviour.is_in(release) for release in self.facts.span or ()}
        except ValueError:
            return None
        return answers.pop() if len(answers) == 1 else None

    @property
    def expandable(self) -> list[Remedy]:
        """The offer to let segments grow, where it was there in pieces; several GPUs' workers die of it (vLLM issue 42609)."""
        if self.symptom.text is not None and self.symptom.text.name == "cuda-driver-not-ready":
            return [NOT_EXPANDABLE]
        return [EXPANDABLE] if self.oom.is_fragmented and self.parallel == 1 else []

    def planned(self, *flags: str) -> list[Remedy]:
        """The plan's advice for these flags, with the computed effect."""
        offers = self.plan.advice if self.plan is not None else ()
        return [Remedy(one.words, f"{one.why}: {one.effect}", one.flag, one.value or None)
                for one in offers if one.flag in flags]  # fmt: skip


def lower_utilization(case: FailureCase, by_bytes: int) -> str | None:
    """The utilisation that leaves so much more outside vLLM's share, rounded down; None where it cannot be computed."""
    if case.utilization is None or not case.total:
        return None
    value = math.floor((case.utilization - (by_bytes + MARGIN_BYTES) / case.total) * 100) / 100
    return f"{value:.2f}" if value >= 0.1 else None


def more_room(case: FailureCase, needed: int) -> Remedy:
    """A smaller cache by what was missing: by its size where that was set by hand, else by the share of the card."""
    given = case.number(BY_HAND)
    if given is not None:
        why = "a size set by hand is not measured against the peaks beside it"
        return smaller_cache(given, given - needed - MARGIN_BYTES, why)
    share = lower_utilization(case, needed)
    why = "leaves more of the card outside the KV cache; costs that much of it"
    if share is None:
        return Remedy("a lower --gpu-memory-utilization, by 0.02 to 0.05", why, "--gpu-memory-utilization")
    return setting("--gpu-memory-utilization", share, why)


def smaller_cache(given: int, fits: int, why: str) -> Remedy:
    """The cache that fits, beside the one that was set by hand; no number where that leaves hardly any."""
    flag = "--kv-cache-memory-bytes"
    if not LEAST_CACHE_BYTES <= fits < given:
        return Remedy(f"a smaller {flag} than {given}", why, flag)
    return Remedy(f"{flag} {fits}, not {given}", why, flag, str(fits))


def gib(size: int | None) -> str:
    """A size for people, or that it is not known; torch says MiB below one GiB, and so do we."""
    if size is None:
        return "an unknown amount"
    return f"{size / MIB:.0f} MiB" if MIB <= abs(size) < GIB else format_gib(size)


def request_clause(case: FailureCase) -> str:
    """The requested and the free memory, in one clause."""
    oom = case.oom
    if oom.tried is None:
        return "the driver refused an allocation and does not say how large"
    text = f"torch asked for {gib(oom.tried)}"
    if oom.free is not None and oom.total is not None:
        text += f", {gib(oom.free)} of {gib(oom.total)} were free"
    if oom.reserved_unallocated and oom.reserved_unallocated >= MIB:
        text += f", {gib(oom.reserved_unallocated)} more were held by torch itself in gaps"
    return text


# A cache whose size was set by hand does not follow the card's share.
_BY_HAND = (
    ("num_gpu_blocks_override", "--num-gpu-blocks-override", "it fixes the number of blocks, whatever the card has"),
    ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", "it fixes the size of the cache, whatever the card has"),
)
_LOWERED = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--max-cudagraph-capture-size", "--max-loras"})
_COUNT = re.compile(r"['\"](\w{1,20})['\"]: ?(\d{1,9})(?![\w.])")
_FLAG = re.compile(r"--[a-z][a-z0-9-]{2,60}")
_NOT_VLLMS = frozenset({"--ipc", "--shm-size", "--ulimit", "--previous", "--explain"})  # docker's, kubectl's, ours

_DROP_CACHES = Remedy(
    "sync; echo 3 > /proc/sys/vm/drop_caches, right before the start",
    "host and GPU share one memory here, and files that the kernel keeps cached count as taken",
)


def fitting(finding: Finding, facts: LogFacts) -> Finding:
    """The finding with the remedies that can work on this machine, in this release, beside the flags in force."""
    flags, remedy = facts.flags, []
    by_hand = next((row for row in _BY_HAND if flags.get(row[0], "None") != "None"), None)
    told = any(by_hand is not None and one.flag == by_hand[1] for one in finding.remedy)
    is_of_cache = finding.code.startswith(("kv.", "startup.no", "startup.con"))
    if "unified" in facts.traits and finding.code is Code.STARTUP_FREE_MEMORY_CHECK:
        remedy.append(_DROP_CACHES)
    for one in finding.remedy:
        offer: Remedy | None = one
        if by_hand is not None and one.flag == "--gpu-memory-utilization" and is_of_cache:
            do = f"{by_hand[1]} is set to {flags[by_hand[0]]}: raise it, or leave it out"
            offer, told = None if told else Remedy(do, by_hand[2], by_hand[1]), True
        elif _is_so_already(one, flags):
            continue
        offer = _spelled(offer, facts) if offer is not None else None
        is_count = offer is not None and offer.flag == "--tensor-parallel-size" and (offer.value or "").isdecimal()
        if offer is not None and not (is_count and facts.cards is not None and int(offer.value or 0) > facts.cards):
            remedy.append(offer)
    useless = []
    for said in finding.not_a_remedy:  # unless its flags are such that no release which this can be has
        named = [flag for flag in _FLAG.findall(said) if flag not in _NOT_VLLMS]
        if not named or any(_is_flag(flag, facts.span) for flag in named):
            useless.append(said)
    return finding._replace(remedy=tuple(remedy), not_a_remedy=tuple(useless))


def _is_flag(flag: str, span: tuple[str, str] | None) -> bool:
    history = history_of(flag) or history_of(flag.replace("--no-", "--", 1))
    if span is None or not history:
        return True  # nothing is known of the release, or of the flag
    try:
        ends = {engine_named(release).release for release in span}
    except BadInput:
        return True
    return all(any(covers(row.first, row.last, release) for row in history) for release in ends)


def _spelled(one: Remedy, facts: LogFacts) -> Remedy | None:
    """The remedy in the words of this machine; None where it has nothing like it."""
    do = one.do
    for trait in facts.traits:
        for here, there in words("machines")[trait].get("instead", {}).items():
            if here in do and not there:
                return None
            do = do.replace(here, there)
    named = [flag for flag in _FLAG.findall(do) if flag not in _NOT_VLLMS]
    gone = [flag for flag in named if not _is_flag(flag, facts.span)]
    if gone and len(gone) == len(set(named)):
        return None
    for flag in gone:  # one of several
        do = do.replace(f"{flag}, ", "").replace(f", {flag}", "").replace(f" and {flag}", "").replace(f"{flag} or ", "")
    return one if do == one.do else one._replace(do=do)


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
    if now == "True" and remedy.value is None and remedy.do.startswith(remedy.flag):
        return True  # a switch that is on
    if now is None or remedy.value is None:
        return False
    if remedy.flag in _LOWERED and now.isascii() and now.isdigit() and remedy.value.isdigit():
        return int(remedy.value) >= int(now)  # offered to be lower, and it is not
    return now == remedy.value
