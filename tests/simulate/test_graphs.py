"""CUDA graphs: which sizes are captured, and what padding to them costs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from plimsoll.simulate.settings import graph_sizes, padded, step_table

META = Path(__file__).resolve().parents[3] / "shared/data/traces/real_runs/RTX4090_Llama-3.1-8B_meta.json.gz"


def test_steps_are_padded_to_the_captured_sizes() -> None:
    """1, 2, 4, then by 8 and by 16 up to 512; above the largest nothing is padded, and a step costs more."""
    assert graph_sizes(1) == (1, 2)
    assert graph_sizes(10) == (1, 2, 4, 8, 16)
    assert graph_sizes(128)[-3:] == (240, 248, 256)
    assert graph_sizes(140)[-2:] == (256, 272)
    assert graph_sizes(5000)[-2:] == (496, 512)
    assert graph_sizes(5000, largest=1024)[-1] == 1024
    assert padded((1, 2, 4, 8), 11).tolist() == [0, 1, 2, 4, 4, 8, 8, 8, 8, 9, 10, 11]
    assert padded((), 3).tolist() == [0, 1, 2, 3]
    assert padded((64,), 3).tolist() == [0, 64, 64, 64]
    table = step_table(1000, 10, 6, (1, 2, 4), 500)
    assert table.tolist() == [1000, 1010, 1020, 1040, 1040, 1550, 1560]
    assert table.dtype == np.int64
    assert step_table(1000, 10, 2, (), 500).tolist() == [1000, 1010, 1020]


@pytest.mark.skipif(not META.exists(), reason="the measured runs are not beside the repository")
def test_sizes_are_those_of_a_real_engine() -> None:
    """What vLLM 0.19 wrote down of itself."""
    config = json.loads(gzip.decompress(META.read_bytes()))["resolved_config"]
    captured = config["compilation_config"]["cudagraph_capture_sizes"]
    assert list(graph_sizes(config["scheduler_config"]["max_num_seqs"])) == captured
