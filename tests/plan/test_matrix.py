"""The grid of contexts and concurrencies: how it is asked for, what a cell says, what must hold for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.plan.ledger import Ledger, plan_ledger
from plimsoll.plan.settings import Card, Settings
from plimsoll.plan.workload import CellState, Matrix, MatrixSpec, plan_matrix
from plimsoll.units import GIB
from tests.each import each
from tests.plan.planning import LLAMA, settings_of

CARD = Card("H100", 79 * GIB, 79 * GIB, 79 * GIB, (9, 0))
FORTY = f"--kv-cache-memory-bytes {40 * GIB}"


def _settings(command: str = "") -> Settings:
    return settings_of(command, on=CARD)


def _replan(changed: Settings) -> Ledger:
    return plan_ledger(LLAMA, changed, CARD)


def _matrix(text: str, command: str = "") -> Matrix:
    return plan_matrix(MatrixSpec.parse(text), _settings(command), _replan, longest=131072)


def test_lists_and_doubling_ranges() -> None:
    """k is a thousand and K 1,024, a..b doubles and ends with b, and each axis rises without doubles."""
    assert MatrixSpec.parse("context=8k,32k,128k concurrency=8..256") == MatrixSpec(
        (8000, 32000, 128000), (8, 16, 32, 64, 128, 256)
    )
    assert MatrixSpec.parse("concurrency=4,1..5,2 context=8K") == MatrixSpec((8192,), (1, 2, 4, 5))


@each(
    "text",
    ["", "context=8k", "concurrency=8", "context=8k concurrency=", "context= concurrency=8", "context=8k,concurrency=8",
     "context=8k context=9k concurrency=8", "ctx=8k concurrency=8", "context=8k concurrency=8..",
     "context=8k concurrency=256..8", "context=8k concurrency=0..8", "context=-1 concurrency=8", "context=auto concurrency=8",
     "context=8k concurrency=1..2..3", "context=1 concurrency=99999999999", "context=8k concurrency=\x1b[31m\n",
     "context=1 concurrency=" + "9" * 5000, "context=1 concurrency=" + ",".join(map(str, range(1, 67)))],
)  # fmt: skip
def test_nonsense_is_one_line(text: str) -> None:
    """What is not a grid is refused in one short printable line that says so."""
    with pytest.raises(BadInput) as caught:
        MatrixSpec.parse(text)
    said = str(caught.value)
    assert said.startswith("--matrix")
    assert said.isprintable()
    assert len(said) < 250


def test_cells_by_hand() -> None:
    """20,479 blocks: 8,192 tokens take 512 of them, so 39 requests fit, 79 half grown, and no more."""
    matrix = _matrix("context=8K,128K concurrency=39,40,79,80", FORTY)
    assert [row[0].state for row in matrix.rows] == [CellState.FITS, CellState.RISK, CellState.RISK, CellState.NO]
    assert matrix.rows[0][0].use == pytest.approx(39 * 512 / 20479)
    assert matrix.rows[0][0].tokens == 39 * 8192
    assert matrix.at_once == (39, 2)
    assert matrix.rows[0][1].state is CellState.NO
    assert matrix.rows[0][1].starts


def test_a_context_that_does_not_start() -> None:
    """Where one request does not fit, or the model does not take the length, no cell of the column fits and each says why."""
    matrix = _matrix("context=64,64k,200k concurrency=1,2", f"--kv-cache-memory-bytes {GIB}")
    assert [cell.starts for cell in matrix.rows[0]] == [True, False, False]
    assert [cell.state for cell in matrix.rows[1]] == [CellState.FITS, CellState.NO, CellState.NO]
    assert "one request" in matrix.rows[0][1].why
    assert "131,072" in matrix.rows[0][2].why
    assert matrix.at_once[1:] == (None, None)
    nothing = _matrix("context=64 concurrency=1", "--gpu-memory-utilization 0.1")
    assert nothing.rows[0][0].why == "nothing is left for the KV cache: vLLM does not start"


def test_what_vllm_refuses_is_a_cell_not_an_end() -> None:
    """A context that cannot be planned leaves the others standing."""

    def replan(changed: Settings) -> Ledger:
        if changed.max_model_len > 10_000:
            raise BadInput("no such context")
        return _replan(changed)

    matrix = plan_matrix(MatrixSpec((8192, 16384), (1,)), _settings(FORTY), replan)
    assert matrix.rows[0][0].state is CellState.FITS
    assert (matrix.rows[0][1].starts, matrix.rows[0][1].why) == (False, "no such context")


def test_the_band_makes_a_risk() -> None:
    """What fits by the central figure but not at the low end of the KV band is called a risk."""
    ledger = _replan(_settings("--max-model-len 8192"))
    assert not ledger.kv.is_exact
    blocks = ledger.kv_plan.blocks_per_request
    most, sure = (ledger.kv_plan.num_blocks - 1) // blocks, (ledger.kv.low // ledger.kv_plan.bytes_per_block - 1) // blocks
    assert sure < most
    matrix = _matrix(f"context=8192 concurrency={sure},{most}")
    assert [row[0].state for row in matrix.rows] == [CellState.FITS, CellState.RISK]
    assert "low end" in matrix.rows[1][0].why


def test_replicas_hold_their_share() -> None:
    """Two engines hold twice as many; requests beyond max_num_seqs of both wait."""
    matrix = _matrix("context=8K concurrency=78,79", f"{FORTY} --data-parallel-size 2 --max-num-seqs 32")
    assert [row[0].state for row in matrix.rows] == [CellState.FITS, CellState.RISK]
    assert [row[0].waits for row in matrix.rows] == [14, 15]
    assert matrix.at_once == (78,)


ORDER = [CellState.FITS, CellState.RISK, CellState.NO]
AXIS = st.lists(st.integers(1, 131072), min_size=1, max_size=5, unique=True).map(lambda values: tuple(sorted(values)))


@given(AXIS, AXIS, st.integers(1, 60))
def test_more_never_fits_when_less_does_not(contexts: tuple[int, ...], numbers: tuple[int, ...], gib: int) -> None:
    """Down a column and along a row the state only gets worse, with a cache of fixed size."""
    matrix = plan_matrix(MatrixSpec(contexts, numbers), _settings(f"--kv-cache-memory-bytes {gib * GIB}"), _replan)
    ranks = [[ORDER.index(cell.state) for cell in row] for row in matrix.rows]
    assert all(row == sorted(row) for row in ranks)
    assert all(list(column) == sorted(column) for column in zip(*ranks, strict=True))
    for row in matrix.rows:
        for cell, most in zip(row, matrix.at_once, strict=True):
            assert (cell.state is CellState.FITS) == (most is not None and cell.concurrency <= most)
