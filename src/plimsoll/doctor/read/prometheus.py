"""Asks a Prometheus server what it remembers of vLLM and of the memory around it, over a stretch of time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from plimsoll.doctor.rules.trend_growth import EXTERNAL_METRICS, MetricSeries
from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.net.address import Address, address
from plimsoll.redaction import printable
from plimsoll.vllm.metrics import figure

POINTS_MAX = 11_000
"""Of one series: what Prometheus itself allows."""
POINTS_USUAL = 720
SERIES_MAX = 2_000
VALUES_MAX = 2_000_000
ANSWER_MAX = 64 << 20
SINCE_S = 3600.0
_STEP_LEAST_S = 1.0
_PAGES = ("/graph", "/query", "/targets", "/alerts", "/status", "/metrics", "/api/v1")  # of its own web pages

# What a judge of trends needs, by our names; vLLM's spelling of every era is asked for.
_FIGURES = (
    "kv_cache_usage", "running", "waiting", "preemptions", "success", "prompt_tokens", "generation_tokens",
    "prefix_queries", "prefix_hits",
)  # fmt: skip
_BY_LABEL = {"waiting_by_reason": "reason", "sleep_state": "sleep_state"}
# Of a histogram only how many: the steps since the start.
_COUNTS = {"vllm:iteration_tokens_total_count": "steps"}


class TimeRange(NamedTuple):
    """A stretch of time and how finely it is looked at, in seconds."""

    start_s: float
    end_s: float
    step_s: float


def is_prometheus(url: str, *, timeout_s: float = 5.0) -> bool:
    """True if a Prometheus server answers there; a vLLM server, or nobody, is not one."""
    try:
        reply = _page(_base(url), "/api/v1/status/buildinfo").get(most_bytes=1 << 20, timeout_s=timeout_s)
    except (WorldFailed, BadInput):
        return False
    answer = reply.table()
    return reply.status == 200 and answer.get("status") == "success" and isinstance(answer.get("data"), dict)


def span(
    *, start_s: float | None = None, end_s: float | None = None, since_s: float = SINCE_S, step_s: float | None = None,
    now_s: float,
) -> TimeRange:  # fmt: skip
    """The stretch asked for: up to now and an hour long unless told otherwise; never more points than Prometheus gives."""
    end = now_s if end_s is None else end_s
    start = end - since_s if start_s is None else start_s
    if not (math.isfinite(start) and math.isfinite(end)) or start >= end or start < 0:
        raise BadInput("the time range ends before it begins")
    length = end - start
    step = max(15.0, math.ceil(length / POINTS_USUAL)) if step_s is None else step_s
    if not math.isfinite(step) or step < _STEP_LEAST_S:
        raise BadInput("the step must be one second or more")
    if length / step >= POINTS_MAX:
        least = math.ceil(length / POINTS_MAX) + 1
        raise BadInput(f"{length / step:,.0f} points are too many: a step of {least} s or more will do")
    return TimeRange(start, end, step)


def fetch_range(
    url: str, *, start_s: float | None = None, end_s: float | None = None, since_s: float = SINCE_S,
    step_s: float | None = None, match: Mapping[str, str] | None = None, timeout_s: float = 30.0,
    clock: Callable[[], float] = time.time,
) -> tuple[MetricSeries, ...]:  # fmt: skip
    """All series a judge of trends can use, within the time and the labels (`match`) asked for."""
    where = _base(url)
    asked = span(start_s=start_s, end_s=end_s, since_s=since_s, step_s=step_s, now_s=clock())
    deadline = time.monotonic() + timeout_s
    found: list[MetricSeries] = []
    gpu = tuple(name for name, (figure, _) in EXTERNAL_METRICS.items() if figure.startswith(("gpu_", "torch_")))
    other = tuple(name for name in EXTERNAL_METRICS if name not in gpu)
    for names in (tuple(name for name in _metrics() if name not in EXTERNAL_METRICS), gpu, other):
        left_s = max(0.1, deadline - time.monotonic())
        found.extend(_answered(where, names, asked, match or {}, left_s))
        if len(found) > SERIES_MAX or sum(len(s.times) for s in found) > VALUES_MAX:
            raise TooLarge(f"{where.shown}: more than {SERIES_MAX:,} series; say whose by a label")
    if not found:
        raise BadInput(f"{where.shown}: no metric of vLLM or of memory in that time; check the range and the scrape")
    return _belonging(found)


@cache
def _metrics() -> dict[str, tuple[str, float]]:
    """Every metric that is asked for, with our name for it and what one of its units is in ours."""
    ours = {name: (of, 1.0) for of in (*_FIGURES, *_BY_LABEL) for name in figure(of).names}
    counts = {name: (of, 1.0) for name, of in _COUNTS.items()}
    return ours | counts | dict(EXTERNAL_METRICS)


def _answered(
    where: Address, names: tuple[str, ...], asked: TimeRange, match: Mapping[str, str], timeout_s: float
) -> list[MetricSeries]:
    for key in match:
        if not key.isascii() or not key.isidentifier():
            raise BadInput(f"{key[:40]!r} is not the name of a label")
    also = "".join(f",{key}={json.dumps(value, ensure_ascii=False)}" for key, value in match.items())
    query = f'{{__name__=~"{"|".join(names)}"{also}}}'
    asks = {"query": query, "start": f"{asked.start_s:.3f}", "end": f"{asked.end_s:.3f}", "step": f"{asked.step_s:g}"}
    target = _page(where, "/api/v1/query_range", urlencode(asks))
    reply = target.get(most_bytes=ANSWER_MAX, timeout_s=timeout_s)
    answer = reply.table()
    if answer.get("status") != "success":
        said = " ".join(printable(str(answer.get("error", ""))[:200]).split()) or "no answer of a Prometheus server"
        raise WorldFailed(f"{target.shown}: answers {reply.status}: {said}")
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list):
        raise WorldFailed(f"{target.shown}: the answer holds no series")
    if len(result) > SERIES_MAX:
        raise TooLarge(f"{where.shown}: more than {SERIES_MAX:,} series; say whose by a label")
    return [one for row in result if (one := _series(row)) is not None]


def _series(row: object) -> MetricSeries | None:
    if not isinstance(row, dict) or not isinstance(row.get("metric"), dict) or not isinstance(row.get("values"), list):
        return None
    labels = {str(key): str(value) for key, value in row["metric"].items()}
    name = labels.pop("__name__", "")
    ours, factor = _metrics().get(name, ("", 1.0))
    times: list[float] = []
    values: list[float] = []
    for pair in row["values"][: POINTS_MAX + 1]:
        try:
            at, value = float(pair[0]), float(pair[1]) * factor
        except (TypeError, ValueError, IndexError, KeyError):
            continue
        if math.isfinite(at) and (not times or at > times[-1]):
            times.append(at)
            values.append(value)
    return MetricSeries(name, labels, tuple(times), tuple(values), ours) if times and name else None


def _belonging(found: list[MetricSeries]) -> tuple[MetricSeries, ...]:
    """Without the memory of processes, containers and GPUs that are known to be somebody else's."""

    def pod(one: MetricSeries) -> str | None:
        return one.labels.get("exported_pod") or one.labels.get("pod")

    def host(one: MetricSeries) -> str:
        return one.labels.get("instance", "").rpartition(":")[0]

    vllm = [one for one in found if one.name.startswith("vllm:")]
    if not vllm:
        return tuple(found)
    targets = {(one.labels.get("job"), one.labels.get("instance")) for one in vllm}
    pods = {one.labels["pod"] for one in vllm if "pod" in one.labels}
    hosts = {host(one) for one in vllm}
    gpus = [one for one in found if one.figure.startswith("gpu_")]
    by_pod, by_host = any(pod(one) in pods for one in gpus), any(host(one) in hosts for one in gpus)

    def belongs(one: MetricSeries) -> bool:
        if one.name.startswith("process_"):
            return (one.labels.get("job"), one.labels.get("instance")) in targets
        if one.name.startswith("container_"):
            named = one.labels.get("container", one.labels.get("name", "")) not in ("", "POD")
            return named and (pod(one) in pods if pods else any("vllm" in value for value in one.labels.values()))
        if one.figure.startswith("gpu_") and (by_pod or by_host):
            return pod(one) in pods if by_pod else host(one) in hosts
        return True

    return tuple(filter(belongs, found))


def _base(url: str) -> Address:
    """The server itself, also where the user pasted the address of one of its pages."""
    where = address(url)
    path = urlsplit(where.url).path
    for page in _PAGES:
        if page in path:
            path = path[: path.index(page)]
    return where.at(path.rstrip("/"))


def _page(where: Address, path: str, query: str = "") -> Address:
    return where.at(urlsplit(where.url).path + path, query)
