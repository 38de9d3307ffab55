"""An engine's figures, read from the bytes of its metrics page in one pass.

A page has thousands of lines, and guard needs about forty. So lines are filtered by their first bytes, and only candidates
are parsed; a line in another form than vLLM's goes to the general parser of `vllm.metrics_page`.

    reader = PageReader()
    reader.feed(first_bytes)
    reader.feed(the_rest)
    reader.done().figures["running"]

A page may cover several engines (data-parallel ranks): counters and queues are summed, ratios take the largest. A figure
that is NaN, infinite or negative is left out: it is unknown.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.errors import TooLarge
from plimsoll.guard.judge.look import CoreFigures, WorkerMemory
from plimsoll.vllm import metrics
from plimsoll.vllm.metrics_page import LINE_MAX, parse_page
from plimsoll.vllm.versions import Engine

SAMPLES_MAX = 10_000  # wanted ones: 64 ranks of 8 workers have 8,000
WORKERS_MAX = 1_024
RANKS_MAX = 1_024
NAME_MAX = 64
WITNESSES = 20  # lines that prove that a page without any wanted sample is a metrics page
WITNESS_MAX = 1_024

SUMMED = (
    "running", "waiting", "preemptions", "prompt_tokens", "generation_tokens", "success", "prefix_queries", "prefix_hits",
    "external_prefix_queries",
)  # fmt: skip
LARGEST = "kv_cache_usage"
RATIO_MAX = 1.001
LINES_MAX = 200_000  # a page of 64 ranks has a tenth of it
NUMBER_MAX = 1e18  # beyond any real count, and sums of such numbers overflow
# Histograms: the figure, which of its sums, and the name of that sum here.
SUMS = (
    ("step_tokens", "_count", "steps"), ("ttft", "_sum", "ttft_sum"), ("ttft", "_count", "ttft_count"),
    ("inter_token", "_sum", "inter_token_sum"), ("inter_token", "_count", "inter_token_count"),
)  # fmt: skip
OF_RANK = ("steps", "running", "waiting")  # in the order of a Rank's fields
SLEEP, CONFIG = "vllm:engine_sleep_state", "vllm:cache_config_info"
STARTED, RESIDENT = "process_start_time_seconds", "process_resident_memory_bytes"
CPU = "process_cpu_seconds_total"
AGE = "plimsoll_figures_age_seconds"
OF_WORKER = {
    "plimsoll_torch_allocated_bytes": "allocated",
    "plimsoll_torch_reserved_bytes": "reserved",
    "plimsoll_torch_releasable_bytes": "releasable",
    "plimsoll_torch_unreleasable_bytes": "unreleasable",
    "plimsoll_torch_num_alloc_retries_total": "retries",
    "plimsoll_torch_num_ooms_total": "ooms",
    "plimsoll_device_total_bytes": "device_total",
    "plimsoll_device_free_bytes": "device_free",
    "plimsoll_device_used_by_others_bytes": "by_others",
    "plimsoll_worker_resident_bytes": "host_resident",
}

Labels = Mapping[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def _wanted() -> dict[bytes, str]:
    """Returns every sample name that may carry a figure, in any release."""
    names = [SLEEP, CONFIG, STARTED, RESIDENT, CPU, AGE, *OF_WORKER]
    for figure in (*SUMMED, LARGEST):
        for name in metrics.figure(figure).names:
            names += [name, name.removesuffix("_total")]
    names += [f"{name}{ending}" for histogram, ending, _ in SUMS for name in metrics.figure(histogram).names]
    return {name.encode(): name for name in names}


_WANTED = _wanted()
_HEAD = min(map(len, _WANTED))
_HEADS = frozenset(name[:_HEAD] for name in _WANTED)
_NAME = re.compile(rb"[ \t\r]*([a-zA-Z0-9_:]+)").match


class PageFigures(NamedTuple):
    """The figures of a page; those that it does not have are absent."""

    figures: Mapping[str, float]
    model: str | None  # the first name it is served by
    started_unix_s: float | None
    config: Labels  # the labels of vllm:cache_config_info, of the first engine
    workers: tuple[WorkerMemory, ...]
    is_cut: bool  # the page ends within a line
    ranks: tuple[CoreFigures, ...] = ()  # if there are several engines


class PageReader:
    """Reads a page as it comes in. Its memory grows only with the wanted samples, not with the page."""

    def __init__(self) -> None:
        self._wanted: list[bytes] = []
        self._witnesses: list[bytes] = []
        self._rest = b""
        self._is_too_long = False
        self._lines = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes; TooLarge beyond what any server has."""
        if self._is_too_long:
            end = data.find(b"\n")
            if end < 0:
                return
            data, self._is_too_long = data[end:], False
        elif self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        self._lines += len(lines)
        if self._lines > LINES_MAX:
            raise TooLarge(f"a page of more than {LINES_MAX:,} lines")
        if len(self._rest) > LINE_MAX:
            self._rest, self._is_too_long = b"", True
        self._take(lines)

    def done(self, engine: Engine | None = None) -> PageFigures:
        """Returns the figures of the whole page; BadInput if it is none. `engine`: its release, for the figures' names."""
        is_cut = bool(self._rest.strip()) or self._is_too_long
        last, self._rest = self._rest, b""
        if last:
            self._take([last])
        others = [line for line in self._witnesses if line not in self._wanted]
        page = parse_page(b"\n".join(self._wanted + others), "the page", None)
        seen = [name for name in _WANTED.values() if name in page.by_name]
        samples = {name: [(one.labels, one.value) for one in page.by_name[name]] for name in seen}
        wanted = [labels for found in samples.values() for labels, _ in found]
        model = next((labels["model_name"] for labels in wanted if "model_name" in labels), None)
        engines = sorted({labels["engine"] for labels in wanted if "engine" in labels}, key=_order)
        ranks = _ranks(samples, engine, engines) if 1 < len(engines) <= RANKS_MAX else ()
        started = _one(samples, STARTED)
        return PageFigures(_figures(samples, engine), model, started, _config(samples), _workers(samples), is_cut, ranks)

    def _take(self, lines: list[bytes]) -> None:
        if len(self._witnesses) < WITNESSES:
            samples = (line for line in lines if line and line[:1] != b"#" and len(line) <= WITNESS_MAX)
            self._witnesses += itertools.islice(samples, WITNESSES - len(self._witnesses))
        # One expression, because it runs for every line. Its second part: lines that begin with a blank.
        for line in [line for line in lines if line[:_HEAD] in _HEADS or line < b"!"]:
            name = _NAME(line)
            if name is not None and name[1] in _WANTED and len(line) <= LINE_MAX:
                self._wanted.append(line)
        if len(self._wanted) > SAMPLES_MAX:
            raise TooLarge(f"more than {SAMPLES_MAX:,} samples of a kind that an engine has few of")


@functools.lru_cache(maxsize=256)
def _names(seen: frozenset[str], engine: Engine | None) -> Mapping[str, tuple[str, bool]]:
    """Returns the sample that carries each figure on a page with these names, and whether it counts blocks."""
    families = seen | {name.removesuffix("_count").removesuffix("_sum") for name in seen}
    found: dict[str, tuple[str, bool]] = {}
    for figure, ending, called in (*((figure, "", figure) for figure in (*SUMMED, LARGEST)), *SUMS):
        name = metrics.on_page(figure, families) if engine is None else metrics.find(figure, engine, families)
        if name is None:
            continue
        resolved = metrics.resolve(figure, engine) if engine is not None and engine.is_exact else None
        in_blocks = resolved is not None and resolved.unit is metrics.Unit.BLOCKS
        name += ending
        found[called] = (name if name in seen else name.removesuffix("_total"), in_blocks)
    return found


def _figures(samples: Samples, engine: Engine | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    for figure, (name, in_blocks) in _names(frozenset(samples), engine).items():
        values = [value for _, value in samples.get(name, ())]
        most = RATIO_MAX if figure == LARGEST else NUMBER_MAX
        if not values or not all(0.0 <= value <= most for value in values):
            continue
        found = max(values) if figure == LARGEST else math.fsum(values)
        size = _config(samples).get("block_size", "") if in_blocks else "1"
        if size.isascii() and size.isdigit() and len(size) < 9:
            figures[figure] = found * float(size)
    for figure, name in (("cpu_seconds", CPU), ("host_resident", RESIDENT)):
        if (value := _one(samples, name)) is not None:
            figures[figure] = value
    awake = [value for labels, value in samples.get(SLEEP, ()) if labels.get("sleep_state") == "awake"]
    if awake and all(value in (0.0, 1.0) for value in awake):
        figures["asleep"] = 1.0 if 0.0 in awake else 0.0
    return figures


def _ranks(samples: Samples, engine: Engine | None, engines: Sequence[str]) -> tuple[CoreFigures, ...]:
    names = _names(frozenset(samples), engine)
    found: list[dict[str, float]] = []
    for figure in OF_RANK:
        sums: dict[str, float] = {}
        for labels, value in samples.get(names[figure][0], ()) if figure in names else ():
            rank = labels.get("engine", "")
            # An invalid number makes the sum NaN, whatever is added.
            sums[rank] = sums.get(rank, 0.0) + (value if 0.0 <= value <= NUMBER_MAX else math.nan)
        found.append({rank: value for rank, value in sums.items() if not math.isnan(value)})
    return tuple(CoreFigures(name, *(values.get(name) for values in found)) for name in engines if len(name) <= NAME_MAX)


def _one(samples: Samples, name: str) -> float | None:
    found = samples.get(name, ())
    return found[0][1] if len(found) == 1 and 0.0 <= found[0][1] <= NUMBER_MAX else None


def _order(name: str) -> tuple[int, str]:
    return (len(name) if name.isdigit() else 1 << 30, name)


def _config(samples: Samples) -> Labels:
    found = [labels for labels, _ in samples.get(CONFIG, ())]
    return min(found, key=lambda labels: _order(labels.get("engine", "")), default={})


def _workers(samples: Samples) -> tuple[WorkerMemory, ...]:
    def worker(labels: Labels) -> tuple[str, str]:
        return labels.get("engine", ""), labels.get("worker", "")

    ages = {worker(labels): value for labels, value in samples.get(AGE, ())}
    parts: dict[tuple[str, str], dict[str, float]] = {}
    for name, field in OF_WORKER.items():
        for labels, value in samples.get(name, ()):
            if 0.0 <= value <= NUMBER_MAX and all(len(part) <= NAME_MAX for part in worker(labels)):
                parts.setdefault(worker(labels), {})[field] = value
    found = []
    for key in sorted(parts, key=lambda key: (_order(key[0]), _order(key[1])))[:WORKERS_MAX]:
        age = ages.get(key, math.inf)
        found.append(WorkerMemory("/".join(key), age if age >= 0.0 else math.inf, **parts[key]))
    return tuple(found)
