"""The other simulators and the comparison with them, without installing or timing anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import simulate_speed as speed
from lab.peers import dynosim
from lab.peers.timed import timed
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import Trace, make_trace
from plimsoll.simulate.trace_files import read_trace


@pytest.fixture
def trace() -> Trace:
    """Three requests that share nothing."""
    return make_trace("three", [0, 1_500_000_001, 3_661_000_000_000], [513, 512, 7], [3, 1, 9])


def ids(trace: Trace) -> list[list[int]]:
    """What DynoSim is told of each prompt."""
    return [json.loads(line)["hash_ids"] for line in dynosim.trace_lines(trace)]


def test_dynosim_is_told_lengths_times_shared_ids_and_usable_blocks(trace: Trace) -> None:
    """An id for every 512 tokens, those of the trace kept; vLLM's 1,025 blocks are 1,024 that can be used."""
    assert ids(trace) == [[0, 1], [2], [3]]
    assert ids(make_trace("shared", [0, 0, 0], [1024, 600, 600], [1, 1, 1], ids=[[7, 8], [7, 9], []])) == [
        [7, 8],
        [7, 9],
        [10, 11],
    ]

    rows = [json.loads(line) for line in dynosim.trace_lines(trace)]
    assert [row["timestamp"] for row in rows] == [0, 1500.000001, 3_661_000]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(513, 3), (512, 1), (7, 9)]
    told = dynosim.engine_arguments(EngineLimits(num_blocks=1025, block_size=32))
    assert (told["num_gpu_blocks"], told["block_size"]) == (1024, 32)


def test_peer_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the peers the benchmark goes on, having said so in one line each."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert speed.peers_ready() == (False, False)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" is left out: ")[0] for line in said] == ["DynoSim", "vLLM's scheduler"]


def test_both_files_and_the_case_for_vllm_hold_the_same_requests(trace: Trace, tmp_path: Path) -> None:
    """Ours reads back the trace to the nanosecond; every request and setting reaches vLLM's scheduler as plain JSON."""
    own, at_once, *_ = speed.works(trace, tmp_path)
    read = read_trace(str(own.ours))
    for name in ("arrival_ns", "prompt", "output"):
        assert getattr(read, name).tolist() == getattr(trace, name).tolist()
    assert read_trace(str(at_once.ours)).arrival_ns.tolist() == [0, 0, 0]
    assert len(own.dynosim.read_text(encoding="utf-8").splitlines()) == trace.size

    case = json.loads(json.dumps(speed.vllm_case(speed.first(trace, 2), speed.TIGHT)))
    assert [request["prompt"] for request in case["requests"]] == [513, 512]
    assert set(case["settings"]) == set(EngineLimits._fields)
    assert case["settings"]["num_blocks"] == 1025


def test_ratios_say_how_much_faster_ours_is(trace: Trace, tmp_path: Path) -> None:
    """Medians are compared, a tool without a command has no second ratio, and its own count of preemptions is shown."""
    work = speed.works(trace, tmp_path)[0]
    found = {
        speed.OURS: [speed.Round(seconds, 2.0, 100, 5, 7) for seconds in (1.0, 9.0, 1.0)],
        speed.DYNOSIM: [speed.Round(2.5, 3.0, 200, None, None)],
        speed.VLLM: [speed.Round(100.0, None, 700, 5, 7)],
    }
    rows = [[cell.strip() for cell in row.split("|")[2:-1]] for row in speed.comparison(work, found, {speed.DYNOSIM: 6})]
    assert rows == [
        ["plimsoll", "3", "3", "", "2", "", "100 MB", "7", "5"],
        ["DynoSim 1.4.2", "1", "1", "2.5x", "1", "1.5x", "200 MB", "-", "6"],
        ["vLLM 0.32.0 scheduler", "1", "0", "100.0x", "-", "", "700 MB", "7", "5"],
    ]


def test_a_command_is_measured_from_outside() -> None:
    """Exit code, both outputs and the memory the command itself held are told, not ours."""
    ours = bytearray(200 << 20)  # what Linux would have the new process inherit
    code = "import sys; print('out'); print('err', file=sys.stderr); held = bytearray(60 << 20); sys.exit(3)"
    done = timed([sys.executable, "-c", code])
    assert (done.exit_code, done.out, done.err) == (3, "out\n", "err\n")
    assert 60 < done.peak_mb < 150 < len(ours) >> 20
    with pytest.raises(OSError, match="no-such-command"):
        timed(["/no-such-command"])
