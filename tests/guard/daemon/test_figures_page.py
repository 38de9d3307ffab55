"""The selective reader of pages: equal to the parsers that read everything. How fast it is: benchmarks/guard_scale.py."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as open_parser
from prometheus_client.parser import text_string_to_metric_families as text_format

from plimsoll.errors import BadInput, TooLarge
from plimsoll.guard.daemon import engine_figures
from plimsoll.guard.daemon.engine_figures import PageFigures, PageReader
from plimsoll.guard.judge.look import CoreFigures
from plimsoll.standin import stand_in
from plimsoll.vllm.metrics_page import parse_page
from plimsoll.vllm.versions import Engine, engine_named
from tests.each import cases, each

OPEN_METRICS: Any = open_parser.text_string_to_metric_families  # it has no types
CAPTURES = Path(__file__).parents[2] / "captures"
CAPTURED = (CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
INSIDE = (CAPTURES / "vllm-0.25.1-h200-inside" / "metrics.txt").read_bytes()
COUNTERS = ("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
            "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:iteration_tokens_total_count")  # fmt: skip
FIGURE: dict[str, str] = dict(cases("guard", "figures by their metric"))
Samples = list[tuple[str, dict[str, str], float]]


def ranks(page: bytes, count: int) -> bytes:
    """The same page as of so many data-parallel ranks."""
    lines = []
    for line in page.decode().splitlines():
        many = [line.replace('engine="0"', f'engine="{rank}"') for rank in range(count)]
        lines += many if 'engine="0"' in line else [line]
    return ("\n".join(lines) + "\n").encode()


def expected(samples: Samples) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for name, labels, value in samples:
        by_name.setdefault(name, []).append(value)
        if name == "vllm:engine_sleep_state" and labels.get("sleep_state") == "awake":
            by_name.setdefault("awake", []).append(value)
    for name, values in by_name.items():
        is_sane = all(0 <= value <= engine_figures.NUMBER_MAX for value in values)
        if name in FIGURE and is_sane:
            figures[FIGURE[name]] = math.fsum(values)
        elif name == "vllm:kv_cache_usage_perc" and is_sane and max(values) <= 1.001:
            figures["kv_cache_usage"] = max(values)
        elif name == "process_resident_memory_bytes" and is_sane and len(values) == 1:
            figures["host_resident"] = values[0]
        elif name == "process_cpu_seconds_total" and is_sane and len(values) == 1:
            figures["cpu_seconds"] = values[0]
        elif name == "awake" and all(value in (0, 1) for value in values):
            figures["asleep"] = float(0 in values)
    return figures


def by_ours(page: bytes) -> Samples:
    """What the reader of whole pages sees."""
    try:
        found = parse_page(page, "x", None).by_name
    except BadInput:
        return []
    return [(sample.name, dict(sample.labels), sample.value) for samples in found.values() for sample in samples]


def read_figures(page: bytes, engine: Engine | None = None) -> PageFigures:
    reader = PageReader()
    reader.feed(page)
    return reader.done(engine)


def in_pieces(page: bytes, sizes: list[int]) -> PageFigures:
    """The page read as a network would bring it."""
    reader, at = PageReader(), 0
    for size in sizes:
        reader.feed(page[at : at + size])
        at += size
    reader.feed(page[at:])
    return reader.done()


OTHERS = ("vllm:num_requests_waiting_by_reason", "vllm:prompt_tokens_by_source_total", "http_requests_total")
NAMES = st.sampled_from(
    [*FIGURE, *OTHERS, "vllm:kv_cache_usage_perc", "vllm:engine_sleep_state", "process_resident_memory_bytes"]
)
VALUES = st.one_of(
    st.integers(0, 10**12).map(str), st.floats(0, 1).map(repr), st.floats(allow_nan=False).map(repr),
    st.sampled_from(["NaN", "+Inf", "-Inf", "nan", "inf", "1e3", "-0.0", "007", "1.", ".5", "5E-324"]),
)  # fmt: skip
LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=8)
ESCAPED = LETTERS.map(lambda text: text.replace("\\", "\\\\").replace('"', '\\"').replace("!", "\\n"))
LABELS = st.fixed_dictionaries(
    {}, optional={"engine": st.sampled_from(["0", "1", "10"]), "model_name": ESCAPED, "finished_reason": ESCAPED,
                  "sleep_state": st.sampled_from(["awake", "discard_all"])},
)  # fmt: skip


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    """One line of a page, as a server may write it."""
    blank = st.sampled_from(["", "", "", " ", "\t", "  "])
    gap = st.sampled_from([" ", " ", " ", "  ", "   ", "\t"])
    labels = draw(LABELS)
    inside = ",".join(f'{draw(blank)}{name}{draw(blank)}="{text}"{draw(blank)}' for name, text in labels.items())
    if inside and draw(st.booleans()):
        inside += ","
    braces = f"{{{inside}}}" if draw(st.booleans()) or labels else ""
    stamp = draw(st.sampled_from(["", "", "", " 1794704900000"]))
    return f"{draw(blank)}{draw(NAMES)}{braces}{draw(gap)}{draw(VALUES)}{stamp}{draw(blank)}"


COMMENTS = ("", "# HELP x y", "  # a word", "# TYPE vllm:x gauge")


@given(st.lists(st.one_of(sample_lines(), st.sampled_from(COMMENTS)), max_size=12),
       st.lists(st.integers(0, 60), max_size=8), st.sampled_from(["\n", "\r\n"]))  # fmt: skip
@example(["vllm:num_requests_running 1"], [1, 1, 1], "\n")
def test_equal_to_both_parsers_on_any_page(lines: list[str], sizes: list[int], end: str) -> None:
    """Escapes, NaN, infinities, stamps, blanks, in whatever pieces it comes: the figures of both parsers."""
    page = "".join(line + end for line in lines)
    theirs: Samples = [
        (sample.name, sample.labels, float(sample.value)) for family in text_format(page) for sample in family.samples
    ]
    if not theirs:
        with pytest.raises(BadInput):
            in_pieces(page.encode(), sizes)
        return
    found = in_pieces(page.encode(), sizes)
    assert found.figures == expected(theirs) == expected(by_ours(page.encode()))
    assert not found.is_cut


@given(st.dictionaries(st.sampled_from(COUNTERS[:5]), st.tuples(ESCAPED, st.floats(0, 1e15), st.booleans()), min_size=1),
       st.lists(st.integers(0, 60), max_size=8))  # fmt: skip
def test_equal_to_the_parser_of_openmetrics(page_of: dict[str, tuple[str, float, bool]], sizes: list[int]) -> None:
    """In OpenMetrics, with exemplars and the end mark."""
    text = ""
    for name, (model, value, has_exemplar) in page_of.items():
        exemplar = ' # {trace_id="a} b"} 0.5 123.4' if has_exemplar else ""
        text += f'# TYPE {name.removesuffix("_total")} counter\n{name}{{engine="0",model_name="{model}"}} {value!r}{exemplar}\n'
    text += "# EOF\n"
    theirs: Samples = [
        (sample.name, sample.labels, float(sample.value)) for family in OPEN_METRICS(text) for sample in family.samples
    ]
    assert in_pieces(text.encode(), sizes).figures == expected(theirs) == expected(by_ours(text.encode()))


@given(st.binary(max_size=300), st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_any_bytes_at_all(noise: bytes, sizes: list[int], has_page: bool) -> None:
    """Noise is no page, and never anything but BadInput; beside a page it is read as the reader of whole pages reads it."""
    page = b"vllm:num_requests_running{" + noise.replace(b"\n", b"") + b"} 1\n" + noise + (b"\n" + INSIDE if has_page else b"")
    try:
        found = in_pieces(page, sizes)
    except BadInput:
        assert not has_page
        return
    if noise.isascii() and not any(letter < 32 for letter in noise):
        assert found.figures == expected(by_ours(page))


PAGES = sorted(path for path in CAPTURES.rglob("*.txt") if b"# TYPE " in path.read_bytes())


@each("path", PAGES)
def test_every_captured_page(path: Path) -> None:
    """Pages of real engines, healthy and failing, have the figures that the reader of whole pages finds on them."""
    page = path.read_bytes()
    assert read_figures(page).figures == expected(by_ours(page))


def test_a_real_page_one_that_is_cut_and_names_of_older_releases() -> None:
    """Cut anywhere but at the end of a line it is known to be cut; a release is read by its own names, blocks become tokens."""
    found = read_figures(CAPTURED)
    assert (found.figures["steps"], found.model, found.config["num_gpu_blocks"]) == (24, "tiny", "4096")
    assert found.started_unix_s == pytest.approx(1.79470470886e9)
    for at in range(2000, 3000, 7):
        assert read_figures(CAPTURED[:at]).is_cut == (CAPTURED[at - 1 : at] != b"\n")
    page = (
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:gpu_prefix_cache_queries_total{model_name="m"} 10\n'
        b'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
    )
    assert read_figures(page).figures == {"kv_cache_usage": 0.5, "prefix_queries": 10}
    assert read_figures(page, engine_named("0.8.5")).figures == {"kv_cache_usage": 0.5, "prefix_queries": 160}


@pytest.mark.parametrize("release", ["0.11.0", "0.14.0", "0.19.0", "0.25.1", "0.32.0"])
def test_every_release_shows_every_figure(release: str) -> None:
    """Whatever a release calls them, all figures that guard judges by are found on its page."""
    page = stand_in(vllm=release).page()
    found = read_figures(page.encode(), engine_named(release)).figures
    assert found == read_figures(page.encode()).figures
    assert {"steps", "kv_cache_usage", *engine_figures.SUMMED} - {"external_prefix_queries"} <= set(found)  # since 0.12.0


LIES = ranks(CAPTURED, 3).replace(b'running{engine="1",model_name="tiny"} 0.0', b'running{engine="1",model_name="tiny"} NaN')


def test_ranks_add_up_and_the_probe_s_figures_of_every_worker_are_bounded() -> None:
    """Of the cache's use the largest, the config of the first; what one lies about takes its sum with it."""
    page = ranks(CAPTURED, 8).replace(
        b'vllm:kv_cache_usage_perc{engine="5",model_name="tiny"} 0.0', b'vllm:kv_cache_usage_perc{engine="5"} 0.75'
    )
    found, one = read_figures(page), read_figures(CAPTURED)
    assert found.figures["prompt_tokens"] == 8 * one.figures["prompt_tokens"]
    assert (found.figures["kv_cache_usage"], found.config["engine"]) == (0.75, "0")
    assert ([rank.name for rank in found.ranks], one.ranks) == (list("01234567"), ())
    lies = read_figures(LIES)
    assert ("running" in lies.figures, lies.figures["waiting"]) == (False, 0)
    assert lies.ranks == (CoreFigures("0", 24, 0, 0), CoreFigures("1", 24, None, 0), CoreFigures("2", 24, 0, 0))
    assert read_figures(LIES, engine_named("0.32.0")).ranks == lies.ranks
    two = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="7"} 1\n'
    assert read_figures(two).ranks == (CoreFigures("0", None, 3, None), CoreFigures("7", None, None, 1))
    many = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(2_000))
    assert read_figures(many).ranks == ()
    assert read_figures(two + b'vllm:num_requests_running{engine="' + b"x" * 99 + b'"} 3\n').ranks == read_figures(two).ranks
    awake = b'sleep_state="awake"} 1.0'
    assert one.figures["asleep"] == 0
    assert read_figures(CAPTURED.replace(awake, awake[:-3] + b"0.0")).figures["asleep"] == 1, "when one rank is"
    (worker,) = read_figures(INSIDE).workers
    assert (worker.rank, worker.allocated, worker.retries, worker.device_total) == ("0/0", 67825706496, 0, 150754820096)
    assert worker.age_s == pytest.approx(0.278, abs=0.01)
    assert worker.host_limit is None
    line = b'plimsoll_torch_allocated_bytes{engine="0",worker="%s"} 1\n'
    many = b"".join(line % str(number).encode() for number in range(3_000))
    workers = read_figures(many).workers
    assert (len(workers), workers[0].rank, workers[-1].rank) == (engine_figures.WORKERS_MAX, "0/0", "0/1023")
    assert read_figures(line % (b"x" * 100)).workers == ()


def test_bombs_are_bounded() -> None:
    """A hundred thousand label sets of one name are refused; a line of a megabyte is passed over; neither takes long."""
    began = time.process_time()
    with pytest.raises(TooLarge):
        read_figures(b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(100_000)))
    with pytest.raises(TooLarge):
        read_figures(b"".join(b'vllm:num_requests_running {e="%d"} 1 5\n' % number for number in range(100_000)))
    with pytest.raises(TooLarge):  # eight megabytes of empty lines cost more to read than any server's page
        in_pieces(b"\n" * 210_000, [10_000] * 21)
    long = b'vllm:num_requests_running{engine="' + b"x" * (1 << 20) + b'"} 7\n'
    assert "running" not in in_pieces(long + b"vllm:num_requests_waiting 2\n", [1000] * 1100).figures
    many = b",".join(b'l%d="x"' % number for number in range(2_000))
    assert read_figures(b"vllm:num_requests_running{" + many + b"} 7\nvllm:num_requests_waiting 2\n").figures == {"waiting": 2}
    assert time.process_time() - began < 10
