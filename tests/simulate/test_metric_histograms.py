"""Pages of metrics: histograms are read and added up, and a page that is not one is refused in one line."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.simulate.trace_files import looks_like_metrics, read_histograms
from plimsoll.vllm.metrics_page import Histogram
from tests.each import each

CAPTURES = Path(__file__).parents[1] / "captures"
CAPTURE = CAPTURES / "vllm-0.32.0-cpu/metrics.txt"
PAGES = sorted(CAPTURES.rglob("*metrics*.txt*"))
_LINE = re.compile(r'(\S+?)_(bucket|sum)(?:\{(?:|.*,)le="([^"]+)".*\}|\{.*\}|) (\S+)')
PAGE = """# HELP h Some.
# TYPE h histogram
h_bucket{engine="0",le="0.1",model_name="a, \\"b\\" }"} 2.0
h_bucket{engine="0",le="+Inf",model_name="a, \\"b\\" }"} 3.0
h_count{engine="0",model_name="a"} 3.0
h_sum{engine="0",model_name="a, \\"b\\" }"} 0.5
h_bucket{engine="1",le="0.1"} 1 1700000000000
h_bucket{engine="1",le="+Inf"} 1
h_sum{engine="1"} 0.25
# TYPE g gauge
g{x="1"} NaN
"""


def written(tmp_path: Path, text: str) -> str:
    """The page as a file."""
    path = tmp_path / "metrics.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_label_sets_are_added_up(tmp_path: Path) -> None:
    """Two engines are one histogram; other metrics and a trace's exemplars are passed over."""
    (found,) = read_histograms(written(tmp_path, PAGE))
    assert found == Histogram("h", (0.1,), (3.0, 1.0), 0.75)
    assert found.size == 4
    assert found.mean == pytest.approx(0.1875)
    page = PAGE.replace("} 2.0\n", '} 2.0 # {trace_id="a} b"} 0.07 1700000000.5\n').replace(" 1700000000000", " 1700000000.0")
    path = written(tmp_path, f"# UNIT h seconds\n{page}# EOF\n")
    assert looks_like_metrics(path)
    assert read_histograms(path) == (Histogram("h", (0.1,), (3.0, 1.0), 0.75),)


@each("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_captured_page_is_added_up_as_by_hand(path: Path) -> None:
    """All histograms of vLLM's own pages, with the bounds, counts and sums that their lines have."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    declared = re.findall(r"^# TYPE (\S+) histogram$", text, re.MULTILINE)
    buckets: dict[str, dict[float, float]] = {}
    sums: dict[str, float] = {}
    for name, what, bound, value in _LINE.findall(text):
        if name in declared and what == "sum":
            sums[name] = sums.get(name, 0.0) + float(value)
        elif name in declared:
            of_it = buckets.setdefault(name, {})
            of_it[float(bound)] = of_it.get(float(bound), 0.0) + float(value)
    found = read_histograms(str(path))
    assert [one.name for one in found] == [name for name in declared if name in buckets]
    for one in found:
        assert [*one.bounds, math.inf] == sorted(buckets[one.name])
        assert list(itertools.accumulate(one.counts)) == [buckets[one.name][bound] for bound in sorted(buckets[one.name])]
        assert one.total == pytest.approx(sums[one.name])


def test_the_captures_have_histograms() -> None:
    """Or the test before would hold of nothing; vLLM 0.32.0's own by its figures."""
    assert len(PAGES) >= 23
    assert sum(len(read_histograms(str(path))) > 15 for path in PAGES) >= 22
    ttft = {one.name: one for one in read_histograms(str(CAPTURE))}["vllm:time_to_first_token_seconds"]
    assert (ttft.size, ttft.bounds[:3]) == (3, (0.001, 0.005, 0.01))
    assert ttft.mean == pytest.approx(0.21888422966003418 / 3)


@each(
    ("text", "says"),
    [
        ("# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\n", "do not rise"),
        ("# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 1\n", "do not end in"),
        ("# TYPE h histogram\nh_bucket{x=\"1\"} 2\n", "h makes no sense"),
        ("# TYPE h histogram\nh_bucket{le=\"one\"} 2\n", "h makes no sense"),
        ("# TYPE h histogram\nh_bucket{le=\"1\"} nan\n", "h makes no sense"),
        ("# TYPE h histogram\nh_bucket{le=1} 2\ng 1\n", "not a line of metrics: 'h_bucket{le=1} 2'"),
        ("# TYPE h histogram\nh_sum -inf\nh_bucket{le=\"+Inf\"} 1\n", "differ|not a number"),
        ("# TYPE h histogram\nh_bucket{le=\"Inf\"} 1\nh_bucket{a=\"2\",le=\"Inf\"} 1\nh_sum 1\n", "a sum is not"),
        ("# TYPE h histogram\nh_bucket{a=\"1\",le=\"Inf\"} 1\nh_sum{a=\"1\"} 1\nh_sum{a=\"2\"} NaN\n", "a sum is not"),
        ("what is this\n", "not a page of metrics"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """The sentence names the histogram or shows the line; a mean out of half of its sums would be wrong."""
    with pytest.raises(BadInput, match=says) as caught:
        read_histograms(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(PAGE.encode())[:-12])  # what is left might end in half a number
    with pytest.raises(BadInput, match="cut or damaged"):
        read_histograms(str(tmp_path / "cut.gz"))


def test_a_trace_is_not_a_page_of_metrics(tmp_path: Path) -> None:
    """A file of requests goes the other way, and so does one that is not there."""
    assert looks_like_metrics(written(tmp_path, PAGE))
    for text in ('{"timestamp": 0, "input_length": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1,2\n"):
        assert not looks_like_metrics(written(tmp_path, text))
    assert not any(map(looks_like_metrics, ("-", str(tmp_path), str(tmp_path / "missing"))))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Nothing but BadInput ever comes out."""
    path = tmp_path_factory.mktemp("page") / "metrics.txt"
    path.write_bytes(("# TYPE h histogram\nh_bucket{" + text).encode("utf-8", "surrogatepass"))
    looks_like_metrics(str(path))
    with contextlib.suppress(BadInput):
        read_histograms(str(path))
