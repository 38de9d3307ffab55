"""The lines that vLLM prints every ten seconds, and its lines about preemption, as figures over time.

    Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 5 reqs,
        Waiting: 12 reqs, GPU KV cache usage: 98.7%, Prefix cache hit rate: 3.1%                              (one line; V1)
    Avg prompt throughput: ..., Running: 5 reqs, Swapped: 0 reqs, Pending: 12 reqs, GPU KV cache usage: 98.7%, CPU ... (V0)

V1's source has had `, Preemptions: N` since 0.13 but up to 0.32 clears the count just before it would print it: that a line has
none means nothing, and where a fork or a later release prints it, it is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import Line, Log
from plimsoll.doctor.rules.trend_growth import Moment
from plimsoll.vllm.log_lines import log_line

EVERY_S = 10.0
"""Between two periodic lines, where the lines have no time of their own."""
TEXT_MAX = 1000
_MARK, _PREEMPTED = "Avg prompt throughput", "is preempted by"


class Whose(NamedTuple):
    """The engine a line speaks of: the container it ran in, the process that said it, and its rank where the line has one."""

    server: str
    process: str
    engine: str


class Preempted(NamedTuple):
    """One warning of the first engine (V0), which it prints at every fiftieth preemption."""

    line: Line
    total: int


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return (
        re.compile(log_line("periodic-stats").pattern),
        re.compile(r"Engine (\d{1,6}): Avg prompt"),
        re.compile(r"Swapped: (\d{1,9}) reqs"),
        re.compile(r"Preemptions: (\d{1,9})"),
        re.compile(r"(?<!External )Prefix cache hit rate: (?:GPU: )?([\d.]{1,9})%"),
    )


# The smallest --max-num-seqs that vLLM takes where none is given.
_LEAST_DEFAULT = 128.0


def moments_of_log(log: Log) -> Mapping[Whose, Sequence[Moment]]:
    """The periodic lines of each engine in their order; without times of their own they count ten seconds each."""
    found: dict[Whose, list[Moment]] = {}
    most = None
    for line in log.lines:
        if _MARK not in line.text:
            if "non-default args: " in line.text:
                given = re.search(r"'max_num_seqs': (\d{1,9})", line.text)
                most = float(given[1]) if given else _LEAST_DEFAULT
            continue
        whose, moment = _moment(line)
        if moment is None:
            continue
        of_it = found.setdefault(whose, [])
        if line.at is None:
            moment = moment._replace(at_s=of_it[-1].at_s + EVERY_S if of_it else 0.0)
        of_it.append(moment._replace(most_running=most))
    return found


def preemptions_of_log(log: Log) -> Mapping[Whose, Sequence[Preempted]]:
    """The warnings of the first engine about preemption, process by process."""
    total = re.compile(r"total_num_cumulative_preemption=(\d{1,12})")
    found: dict[Whose, list[Preempted]] = {}
    for line in log.lines:
        if _PREEMPTED in line.text and "KV cache" in line.text:
            said = total.search(line.text)
            found.setdefault(Whose(line.server, line.process, ""), []).append(Preempted(line, int(said[1]) if said else 1))
    return found


def kv_tokens_of_log(log: Log) -> float | None:
    """How many tokens the KV cache holds, as the start said; the last word counts."""
    pattern = re.compile(log_line("kv-size").pattern)
    found: float | None = None
    for line in log.lines:
        if "KV cache size: " in line.text and (said := pattern.search(line.text[:TEXT_MAX])) is not None:
            text = said["tokens"].replace(",", "")
            found = float(text) if text and len(text) < 16 else found
    return found


def _moment(line: Line) -> tuple[Whose, Moment | None]:
    periodic, rank, swapped, preempted, hits = _patterns()
    text = line.text[:TEXT_MAX]
    engine = rank.search(text)
    whose = Whose(line.server, line.process, engine[1].lstrip("0") or "0" if engine else "")
    said = periodic.search(text)
    if said is None:
        return whose, None
    numbers = [_number(said[name]) for name in ("running", "waiting", "kv_percent", "prompt_per_s", "generation_per_s")]
    running, waiting, percent, prompt, generation = numbers
    if running is None or waiting is None:
        return whose, None
    more = [_number(found[1]) if (found := one.search(text)) else None for one in (swapped, preempted, hits)]
    moment = Moment(
        line.at or 0.0, running, waiting, percent / 100 if percent is not None else None, prompt, generation,
        more[0], more[1], more[2] / 100 if more[2] is not None else None, line.number, text,
    )  # fmt: skip
    return whose, moment


def _number(text: str) -> float | None:
    try:
        value = float(text[:24])
    except ValueError:
        return None
    return value
