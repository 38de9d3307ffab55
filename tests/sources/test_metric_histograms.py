"""Pages of metrics: histograms are read and added up, and a page that is not one is refused in one line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.domain.histogram import Histogram
from plimsoll.errors import BadInput
from plimsoll.sources.metric_histograms import looks_like_metrics, read_histograms

CAPTURE = Path(__file__).resolve().parents[3] / "shared/data/captures/vllm-0.32.0-cpu/metrics.txt"
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
    """Two engines are one histogram; other kinds of metrics are passed over, whatever their values."""
    (found,) = read_histograms(written(tmp_path, PAGE))
    assert found == Histogram("h", (0.1,), (3.0, 1.0), 0.75)
    assert found.size == 4
    assert found.mean == pytest.approx(0.1875)


@pytest.mark.skipif(not CAPTURE.exists(), reason="the captures are not beside the repository")
def test_a_real_page_is_read() -> None:
    """vLLM 0.32.0's own."""
    found = {one.name: one for one in read_histograms(str(CAPTURE))}
    ttft = found["vllm:time_to_first_token_seconds"]
    assert ttft.size == 3
    assert ttft.mean == pytest.approx(0.21888422966003418 / 3)
    assert ttft.bounds[:3] == (0.001, 0.005, 0.01)
    assert looks_like_metrics(str(CAPTURE))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\n", "do not rise"),
        ("# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 1\n", "do not end in"),
        ("# TYPE h histogram\nh_bucket{x=\"1\"} 2\n", "line 2: a bucket of h has no bound"),
        ("# TYPE h histogram\nh_bucket{le=\"one\"} 2\n", "line 2: not a number: 'one'"),
        ("# TYPE h histogram\nh_bucket{le=\"1\"} nan\n", "line 2: not a number"),
        ("# TYPE h histogram\nh_bucket{le=1} 2\n", "line 2: labels cannot be read"),
        ("# TYPE h histogram\nh_sum -inf\nh_bucket{le=\"+Inf\"} 1\n", "differ|not a number"),
        ("what is this\n", "line 1: not a line of metrics"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """The line says which one."""
    with pytest.raises(BadInput, match=says) as caught:
        read_histograms(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_trace_is_not_a_page_of_metrics(tmp_path: Path) -> None:
    """A file of requests goes the other way, and so does one that is not there."""
    assert not looks_like_metrics(written(tmp_path, '{"timestamp": 0, "input_length": 1}\n'))
    assert not looks_like_metrics(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1,2\n"))
    assert not looks_like_metrics(str(tmp_path / "missing"))
    assert looks_like_metrics(written(tmp_path, PAGE))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Nothing but BadInput ever comes out."""
    path = tmp_path_factory.mktemp("page") / "metrics.txt"
    path.write_bytes(("# TYPE h histogram\nh_bucket{" + text).encode("utf-8", "surrogatepass"))
    looks_like_metrics(str(path))
    with contextlib.suppress(BadInput):
        read_histograms(str(path))
