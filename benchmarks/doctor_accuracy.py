"""How often doctor is right, over labelled logs of other people and logs of our own, each source left out in turn.

    python -m benchmarks.doctor_accuracy [--logs FOLDER] [--write]

A text that vLLM prints is known from its releases, and one of torch, CUDA, a library, a shell or the kernel from what these
print, whoever's log shows it. A text that nobody defines (a script's own words), known from one source only, is taken out
before that source is judged. The last column is stricter than it need be: there every text that is not vLLM's
and occurs in one source only is taken out, so that nothing can rest on having seen it.
`--write` puts the table into docs/doctor.md. The labelled logs are not part of the repository; FOLDER has them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.marked import placed
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.vllm.failure_texts import TEXTS, FailureText
from plimsoll.vllm.versions import spans_of

ROOT = Path(__file__).parents[1]
LOGS = ROOT.parent / "shared" / "data" / "logs"
CAPTURES = ROOT / "tests" / "captures"
DOCS = ROOT / "docs" / "doctor.md"
PROMISED = 0.95

# The codes that a label's stage allows, any of them right.
STAGES: dict[str, tuple[str, ...]] = {
    "startup-weights": ("startup.weights-do-not-fit",),
    "startup-profile": ("startup.profile-run", "startup.profile-neighbour"),
    "startup-kv": ("startup.no-cache-blocks", "startup.context-too-long"),
    "startup-graph-capture": ("startup.graph-capture",),
    "startup-sampler-warmup": ("startup.sampler-warmup",),
    "startup-free-memory-check": ("startup.free-memory-check",),
    "runtime-logits": ("runtime.logits",),
    "runtime-forward": ("runtime.forward",),
    "runtime-other-process": ("startup.free-memory-check", "runtime.neighbour", "startup.profile-neighbour"),
    "host-ram": ("host.out-of-memory", "host.growth"),
    "preemption-thrash": ("kv.preemption-storm", "kv.saturated"),
}
MAY_BE_UNKNOWN = ("n-killed-while-loading", "a-host-jit-cicc-spark")  # these two simply stop


# A script's own words that others print as well.
KNOWN_ELSEWHERE = {"script-stops": "'Stopping vLLM server' stands in the scripts of more than ten public repositories"}


class Labelled(NamedTuple):
    """One log and what is right about it."""

    name: str
    source: str  # the repository it was published in, or ours
    path: Path
    codes: tuple[str, ...]  # any of them is right; empty where none or `other.*` is
    memory: tuple[bool | None, ...]


class Scored(NamedTuple):
    """One log, judged."""

    labelled: Labelled
    code: str | None
    memory: bool | None

    @property
    def code_is_right(self) -> bool:
        """Whether the first finding names the cause."""
        if self.labelled.codes:
            return self.code in self.labelled.codes or (self.code is None and None in self.labelled.memory)
        return self.code is None or self.code.startswith(("other.", "engine.")) or self.code == "startup.bad-flag"

    @property
    def memory_is_right(self) -> bool:
        """Whether it says rightly that memory was, or was not, the trouble."""
        return self.memory in self.labelled.memory


def of_others(folder: Path) -> Iterator[Labelled]:
    """The published logs."""
    for line in (folder / "labels.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row.get("file"):
            continue
        codes = [*STAGES.get(row["stage"], ())]
        codes += [code for stage, allowed in STAGES.items() if stage in (row.get("phase") or "") for code in allowed]
        memory: tuple[bool | None, ...] = (not row["negative"], *([None] if row["id"] in MAY_BE_UNKNOWN else []))
        source = re.sub(r":.*", "", row["source"])
        yield Labelled(row["id"], source, folder / row["file"], () if row["negative"] else tuple(codes), memory)


def of_ours() -> Iterator[Labelled]:
    """Failures that were provoked on an H200 and on the CPU build; their labels stand beside them."""
    for folder in (*(f"vllm-0.25.1-h200-{part}" for part in ("failures", "proof", "survive")), "vllm-0.32.0-failures"):
        labels = CAPTURES / folder / "labels.json"
        if labels.is_file():
            for row in json.loads(labels.read_text(encoding="utf-8")):
                path = next(path for path in (CAPTURES / folder).glob(f"{row['name']}.log*"))
                memory = tuple(row["memory_failure"]) if isinstance(row["memory_failure"], list) else (row["memory_failure"],)
                yield Labelled(row["name"], f"ours: {folder}", path, tuple(row["expect"]), memory)


def judged(labelled: Labelled, log: Log, texts: Sequence[FailureText]) -> Scored:
    """What doctor says of one log with these texts alone."""
    found = diagnose([log], texts=texts)
    return Scored(labelled, str(found.findings[0].code) if found.findings else None, found.memory_failure)


def left_out(taught: Mapping[str, set[str]], source: str, *, strictly: bool) -> list[FailureText]:
    """The texts that stay when what one source alone taught is forgotten."""
    alone = taught[source].difference(*(names for other, names in taught.items() if other != source))
    return [
        text
        for text in TEXTS
        if text.name not in alone or spans_of("failure_texts", text.name) or not (strictly or _is_nobodys(text))
    ]


def _is_nobodys(text: FailureText) -> bool:
    return text.speaker == "script" and text.name not in KNOWN_ELSEWHERE


def _counts(scored: Sequence[Scored]) -> str:
    code, memory = sum(one.code_is_right for one in scored), sum(one.memory_is_right for one in scored)
    return f"{code} and {memory} of {len(scored)}"


def table(logs: Sequence[tuple[Labelled, Log]]) -> tuple[str, list[Scored]]:
    """One row a source, and every log as it was judged with its source left out."""
    lines = [
        "| source | right code and right on memory, the source left out | nothing but vLLM's own texts kept of it |",
        "|---|---|---|",
    ]
    others: list[Scored] = []
    strict: list[Scored] = []
    ours: list[Scored] = []
    taught: dict[str, set[str]] = {}
    for labelled, log in logs:
        taught.setdefault(labelled.source, set()).update(hit.text.name for hit in read_timeline(log).hits)
    for source in taught:
        own = [(labelled, log) for labelled, log in logs if labelled.source == source]
        if source.startswith("ours"):
            mine = [judged(labelled, log, TEXTS) for labelled, log in own]
            ours += mine
            lines.append(f"| {source}, with all texts | {_counts(mine)} | |")
            continue
        kept = {strictly: left_out(taught, source, strictly=strictly) for strictly in (False, True)}
        mine = [judged(labelled, log, kept[False]) for labelled, log in own]
        harsh = mine if kept[True] == kept[False] else [judged(labelled, log, kept[True]) for labelled, log in own]
        forgotten = sorted({text.name for text in TEXTS} - {text.name for text in kept[True]})
        others += mine
        strict += harsh
        lines.append(
            f"| {source} | {_counts(mine)} | {_counts(harsh)}{', without ' if forgotten else ''}{', '.join(forgotten)} |"
        )
    if others:
        lines.insert(2, f"| **all logs of other people** | **{_counts(others)}** | {_counts(strict)} |")
    return "\n".join(lines), others + ours


def main() -> None:
    """Measure, print, and fail where less is right than was promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("doctor_accuracy.py") else [])
    everything = [*(of_others(options.logs) if options.logs.is_dir() else ()), *of_ours()]
    logs = [(labelled, read_log(str(labelled.path))) for labelled in everything]
    made, scored = table(logs)
    print(made)
    for one in scored:
        if not (one.code_is_right and one.memory_is_right):
            right = one.labelled.codes or "no memory code"
            print(f"  {one.labelled.source} {one.labelled.name}: said {one.code}, {one.memory}; right is {right}")
    if options.write:
        text = DOCS.read_text(encoding="utf-8")
        start, end = "<!-- accuracy: python -m benchmarks.doctor_accuracy --write -->\n", "<!-- end of accuracy -->"
        DOCS.write_text(placed(text, start, end, f"{made}\n", DOCS), encoding="utf-8")
    others = [one for one in scored if not one.labelled.source.startswith("ours")]
    if others and (
        sum(one.code_is_right for one in others) / len(others) < PROMISED or not all(one.memory_is_right for one in others)
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
