"""Start logs, as vLLM really printed them: every figure, every release's way of saying it, and hostile files."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.plan import store
from plimsoll.plan.store import read_start
from plimsoll.units import GIB
from plimsoll.vllm.log_lines import Measured
from tests.each import cases, each

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200"

# Each release's own words (the format strings of its source) around the figures of published starts: 0.19.0 with DEBUG, a 70B
# in fp8 on two H100s (llm-d-planner#205); 0.7.3, an 8B on one H100; from 0.27, on a 96 GB card; 0.32.0 on a CPU, our own.
LOGS = Path(__file__).parent / "start_logs"
TWO_WORKERS, FIRST_ENGINE, CONSUMED, ON_A_CPU = (
    (LOGS / f"{name}.log").read_text(encoding="utf-8") for name in ("two-workers", "first-engine", "consumed", "on-a-cpu")
)
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "logs"


def _read(folder: Path, text: str | bytes) -> Measured:
    path = folder / "start.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_start(path)


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


@each(("log", "figures", "batch"), cases("plan", "real_starts_on_an_h200"))
def test_real_starts_on_an_h200(log: str, figures: tuple[float | None, ...], batch: int) -> None:
    """Each figure that vLLM 0.25.1 prints at its normal level is read, and what it does not print is None."""
    found = read_start(CAPTURES / log)
    assert (found.release, found.tensor_parallel, found.ranks) == ("0.25.1", 1, 1)
    memory = (_gib(found.weights_bytes), _gib(found.kv_bytes), found.kv_tokens, found.max_concurrency)
    assert (*memory, found.utilization, _gib(found.graphs_actual_bytes)) == figures
    assert (found.max_num_batched_tokens, found.enforce_eager) == (batch, log != "base.log")
    assert found.activation_bytes is found.non_torch_bytes is found.consumed_bytes is found.total_bytes is None


def test_two_workers_of_0_19_with_debug_lines(tmp_path: Path) -> None:
    """Up to 0.26 every term is printed by itself, and activation is not touched by the graphs' estimate."""
    found = _read(tmp_path, TWO_WORKERS)
    assert (found.ranks, found.tensor_parallel, found.utilization) == (2, 2, 0.95)
    assert (_gib(found.total_bytes), _gib(found.free_bytes), _gib(found.requested_bytes)) == (79.19, 77.66, 75.23)
    assert (_gib(found.weights_bytes), _gib(found.non_torch_bytes), _gib(found.activation_bytes)) == (33.88, 2.1, 1.96)
    assert (_gib(found.graphs_estimated_bytes), _gib(found.graphs_actual_bytes)) == (1.82, 1.79)
    assert found.graphs_subtracted is False
    assert (_gib(found.kv_bytes), found.kv_tokens, found.max_concurrency) == (37.28, 244_304, 29.82)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not beside the repository")
@pytest.mark.parametrize(("log", "ranks"), [("a-sampler-gptoss20b-tp1", 1), ("a-sampler-gptoss20b-tp2", 2)])
def test_real_debug_logs_add_up(log: str, ranks: int) -> None:
    """In whole logs of 0.19.0 as others published them, the terms that are read make up the request."""
    found = read_start(SHARED / f"{log}.log.gz")
    assert (found.release, found.ranks, found.tensor_parallel) == ("0.19.0", ranks, ranks)
    terms = [found.weights_bytes, found.non_torch_bytes, found.activation_bytes, found.kv_bytes]
    assert sum(term for term in terms if term is not None) == pytest.approx(found.requested_bytes, abs=0.03 * GIB)


def test_the_summary_from_0_27(tmp_path: Path) -> None:
    """Weights and non-torch come as one figure, and the graphs' estimate is taken out of activation again."""
    found = _read(tmp_path, CONSUMED)
    assert (_gib(found.consumed_bytes), _gib(found.weights_bytes), found.non_torch_bytes) == (64.44, 62.1, None)
    assert (_gib(found.activation_bytes), _gib(found.graphs_estimated_bytes), found.graphs_subtracted) == (3.79, 0.4, True)
    assert (_gib(found.total_bytes), _gib(found.kv_bytes)) == (94.97, 17.79)


def test_the_first_engine(tmp_path: Path) -> None:
    """Up to 0.8 the ledger is one message over three lines, and blocks are counted."""
    found = _read(tmp_path, FIRST_ENGINE)
    assert (found.release, found.blocks, found.max_concurrency, found.enforce_eager) == ("0.7.3", 28079, 109.68, True)
    assert (_gib(found.total_bytes), found.utilization, _gib(found.requested_bytes)) == (79.11, 0.9, 71.2)
    assert (_gib(found.weights_bytes), _gib(found.non_torch_bytes), _gib(found.activation_bytes)) == (14.99, 0.16, 1.21)
    assert _gib(found.kv_bytes) == 54.84


def test_the_cpu_build(tmp_path: Path) -> None:
    """The memory node is the card; what the worker holds is not split into terms. A cache that somebody set tells nothing."""
    found = _read(tmp_path, ON_A_CPU)
    assert (_gib(found.total_bytes), found.utilization, _gib(found.requested_bytes)) == (22.71, 0.11, 2.5)
    assert (_gib(found.kv_bytes), found.kv_tokens, found.max_concurrency) == (1.89, 1_984_512, 969.0)
    assert found.weights_bytes is found.consumed_bytes is found.non_torch_bytes is found.activation_bytes is None
    line = "(Worker pid=72) INFO 11-15 09:14:14 [cpu_worker.py:260] Explicitly set (1.0/23.21) GiB for KV cache on node 0.\n"
    with pytest.raises(BadInput, match="no memory figures"):
        _read(tmp_path, line)


def test_colours_carriage_returns_and_gzip_change_nothing(tmp_path: Path) -> None:
    """A log as a terminal or a log driver kept it reads the same."""
    coloured = TWO_WORKERS.replace("(Worker_TP0 pid=71)", "\x1b[0;36m(Worker_TP0 pid=71)\x1b[0;0m").replace("\n", "\r\n")
    driver = "".join(json.dumps({"log": line + "\n", "stream": "stdout"}) + "\n" for line in TWO_WORKERS.splitlines())
    expected = _read(tmp_path, TWO_WORKERS)
    assert (
        _read(tmp_path, coloured) == _read(tmp_path, driver) == _read(tmp_path, gzip.compress(TWO_WORKERS.encode())) == expected
    )


def test_the_rank_with_the_least_cache_rules(tmp_path: Path) -> None:
    """Figures of one rank are not mixed with those of another that holds less."""
    other = TWO_WORKERS.splitlines()[-1].replace("pid=72", "pid=73").replace("33.88 GiB for weight", "34.5 GiB for weight")
    found = _read(tmp_path, TWO_WORKERS + other.replace("in use is 37.28", "in use is 36.66") + "\n")
    assert (_gib(found.kv_bytes), _gib(found.weights_bytes), found.ranks) == (36.66, 34.5, 3)


def test_of_several_starts_the_last_that_got_a_cache(tmp_path: Path) -> None:
    """A crash loop appended to a good start does not hide it, and a later good start replaces it."""
    base = (CAPTURES / "base.log").read_text(encoding="utf-8")
    eager = (CAPTURES / "eager90.log").read_text(encoding="utf-8")
    failed = "".join(line for line in eager.splitlines(keepends=True) if "KV cache" not in line)
    assert _read(tmp_path, base + eager).kv_tokens == 898_784
    assert _read(tmp_path, base + failed).kv_tokens == 919_824


def test_memory_that_came_back_during_capture_is_no_figure(tmp_path: Path) -> None:
    """A neighbour that freed memory makes vLLM print that graphs took -1.22 GiB: that is unknown, not negative."""
    line = (
        "(Worker_TP0 pid=9) INFO 02-04 23:26:14 [gpu_model_runner.py:5051] Graph capturing finished in 3 secs, took -1.22 GiB\n"
    )
    found = _read(tmp_path, "Model loading took 10.0 GiB memory and 7.6 seconds\nAvailable KV cache memory: -4.06 GiB\n" + line)
    assert found.graphs_actual_bytes is None
    assert _gib(found.kv_bytes) == -4.06


@pytest.mark.parametrize(
    "content",
    [b"", b"nothing of vLLM\n", b"{}", b"[1]", b"\x00" * 100_000, b"{" * 50_000, b"INFO KV cache size: , tokens\n",
     b"Model loading took 1.2.3 GiB\n", b"Model loading took " + b"9" * 5000 + b" GiB and 1 seconds\n"],
)  # fmt: skip
def test_a_file_that_is_no_start(tmp_path: Path, content: bytes) -> None:
    """One line that says what is wanted."""
    with pytest.raises(BadInput, match="no memory figures") as refusal:
        _read(tmp_path, content)
    assert "\n" not in str(refusal.value)


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    """A cut-off gzip, a folder and a missing file are each named."""
    with pytest.raises(BadInput, match="gzip"):
        _read(tmp_path, gzip.compress(TWO_WORKERS.encode())[:-20])
    with pytest.raises(BadInput, match="looks like gzip and is not"):
        _read(tmp_path, b"\x1f\x8b" + b"junk" * 10)
    with pytest.raises(BadInput):
        read_start(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_start(tmp_path / "missing.log")


def test_a_file_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit, packed or not, reading ends and the line says what to give instead."""
    monkeypatch.setattr(store, "LOG_MAX_BYTES", 1 << 20)
    for content in (b"x" * (2 << 20), b"\n" * (2 << 20), gzip.compress(b"y" * (2 << 20))):
        with pytest.raises(TooLarge, match="the part that holds the start"):
            _read(tmp_path, content)


@given(
    st.lists(st.sampled_from(TWO_WORKERS.splitlines() + CONSUMED.splitlines()), max_size=12),
    st.binary(max_size=60),
    st.integers(0, 400),
)
def test_any_mixture_of_lines_is_read_or_refused(tmp_path: Path, lines: list[str], junk: bytes, cut: int) -> None:
    """Lines in any order, cut anywhere, with junk between them, never end in a traceback."""
    content = b"\n".join(line.encode() + junk for line in lines)
    with suppress(BadInput):
        _read(tmp_path, content[: max(0, len(content) - cut)])
