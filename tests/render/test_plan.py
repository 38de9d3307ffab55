"""Plans as a user reads them: side by side, the workload and the grid."""

from __future__ import annotations

import json
import re

import pytest

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.check_flags import check
from plimsoll.launch.command_line import EntryPoint, Launch, read_command_line
from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import KvPlan, plan_kv
from plimsoll.plan.kv_layers import FullSpec, NamedSpec, SlidingSpec
from plimsoll.plan.ledger import ModelFacts, plan_ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.plan.workload import Cell, CellState, Matrix, MatrixSpec, Pool, Workload, WorkloadAnswer, judge
from plimsoll.render.plan import (
    ComparedPlan,
    cell_text,
    compare_as_json,
    compare_as_text,
    letter,
    matrix_lines,
    percent,
    workload_lines,
)
from plimsoll.render.terminal import WIDTH
from plimsoll.units import GIB
from plimsoll.vllm.versions import engine_named
from tests.each import each

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA = ModelFacts("llama", ModelShape.from_config(CONFIG))
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


def planned(*flags: str, model: str = "org/llama", gib: int = 79, used: int = 0) -> MemoryPlan:
    """A command's plan on a card of that size."""
    card = Card("H100", gib * GIB, gib * GIB - used, gib * GIB + used, (9, 0), used_bytes=used)
    line = read_command_line(["m", *flags], "0.32.0")
    ledger = plan_ledger(LLAMA, read_settings(Flags(line, "0.32.0"), {}, LLAMA.shape, card), card)
    checked = check(Launch("command line", EntryPoint.SERVE, (model, *flags)), engine_named("0.32.0"))
    trouble = Finding(Code.STARTUP_CONTEXT_TOO_LONG, Severity.CRITICAL, 0.9, "one request does not fit", "it is long")
    return MemoryPlan(model, ledger, [] if ledger.fits else [trouble], [], checked, LLAMA.shape)


def _compared(*plans: MemoryPlan | str) -> list[ComparedPlan]:
    """Plans, or why there is none, as lines of a file."""
    made = [(None, one) if isinstance(one, str) else (one, "") for one in plans]
    return [ComparedPlan(f"f:{number}", plan, why) for number, (plan, why) in enumerate(made, 1)]


def _line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip(" *").startswith(name))


def test_rows_that_differ_are_marked() -> None:
    """With by how much, in GiB; two equal commands have no mark, and the text says so."""
    text = str(compare_as_text(_compared(planned(), planned("--kv-cache-dtype", "fp8"))))
    assert _line(text, "kv-cache-dtype").split() == ["*", "kv-cache-dtype", "auto", "fp8"]
    assert _line(text, "bytes per block").split()[-2:] == ["2,097,152", "1,048,576"]
    assert _line(text, "KV tokens").lstrip().startswith("*")
    assert _line(text, "GPU").lstrip().startswith("GPU")
    assert "B  f:2: vllm serve org/llama --kv-cache-dtype fp8" in text
    text = str(compare_as_text(_compared(planned(), planned("--gpu-memory-utilization", "0.82"))))
    assert "(-7.90)" in _line(text, "requested")
    assert "(-7.90)" in _line(text, "KV cache")
    assert _line(text, "weights").lstrip().startswith("weights")
    text = str(compare_as_text(_compared(planned(), planned())))
    assert [line for line in text.splitlines() if line.lstrip().startswith("* ")] == [text.splitlines()[-1]]
    assert "nothing differs" in text


def test_a_line_that_cannot_be_planned_stays_in_its_place() -> None:
    """One bad line does not hide the others; it is neither a plan nor a difference. What stops a plan is named below."""
    both = _compared(planned(), f"no such\nmodel {SECRET}")
    text, body = str(compare_as_text(both)), json.loads(compare_as_json(both))
    assert "B  f:2: not planned: no such model [redacted]" in text
    assert "nothing differs" in text
    assert (body["compare"][1]["plan"], body["compare"][1]["problem"]) == (None, "no such model [redacted]")
    assert body["fits"] is False
    text = str(compare_as_text(_compared(planned(), planned(gib=20))))
    assert _line(text, "verdict").split() == ["*", "verdict", "fits", "does", "not", "fit"]
    assert "  B  startup.context-too-long: one request does not fit" in text


def test_many_plans_fit_the_screen() -> None:
    """Many plans make several tables, each beside the first plan, none wider than a screen; the alphabet goes round."""
    text = str(compare_as_text(_compared(*([planned()] * 8), planned("--enforce-eager"))))
    assert max(map(len, text.splitlines())) <= WIDTH
    heads = [line.split() for line in text.splitlines() if re.fullmatch(r" {20,}A( +[B-I])+", line)]
    assert len(heads) > 1
    assert [letter for head in heads for letter in head[1:]] == list("BCDEFGHI")
    assert sum("* eager" in " ".join(line.split()) for line in text.splitlines()) == len(heads)
    assert [letter(n) for n in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]


def test_hostile_and_secret_text() -> None:
    """Control characters and tokens in a model's name reach neither the table nor the JSON."""
    one = ComparedPlan("f\x1b[31m:1", planned(model=f"a\x1b[2J\n{SECRET}"))
    for text in (str(compare_as_text([one])), compare_as_json([one])):
        assert not [hidden for hidden in ("\x1b", "\\u001b", SECRET) if hidden in text]


FULL = FullSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16")
WINDOW = SlidingSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16", window=128)


def _answer(workload: Workload, *, windows: bool = False, starts: bool = True, blocks: int = 20480) -> WorkloadAnswer:
    layers = [FULL, WINDOW] if windows else [FULL]
    specs = (tuple(NamedSpec(f"layers.{n}", layers[n % len(layers)]) for n in range(32)),)
    cache = Settings(max_model_len=131072, prefix_caching=False, num_gpu_blocks_override=blocks, max_num_seqs=256)
    plan: KvPlan = plan_kv(specs, cache, 0)
    return judge(workload, Pool(plan, specs, cache, blocks - 1000, blocks + 1000, starts=starts))


def _cell(context: int, number: int, state: CellState, use: float | None, *, starts: bool = True, waits: int = 0) -> Cell:
    return Cell(context, number, state, starts, use, context * number, waits, "because <b>hf_" + "a" * 34)


def _matrix(contexts: int = 3) -> Matrix:
    lengths = tuple(8192 * (n + 1) for n in range(contexts))
    spec = MatrixSpec(lengths, (8, 512))
    first = (_cell(8192, 8, CellState.FITS, 0.2), *(_cell(c, 8, CellState.RISK, 1.14) for c in lengths[1:-1]))
    second = (_cell(8192, 512, CellState.NO, 13.0, waits=256), *(_cell(c, 512, CellState.NO, 70.0) for c in lengths[1:-1]))
    last = [_cell(lengths[-1], number, CellState.NO, None, starts=False) for number in spec.concurrencies]
    return Matrix(spec, ((*first, last[0]), (*second, last[1])), (39, *(7 for _ in lengths[1:-1]), None))


def test_the_table_needs_no_colour() -> None:
    """Every cell says its state in a word and its use in a number; a refused context says why, without a secret."""
    text = "\n".join(str(matrix_lines(_matrix())).splitlines())
    assert "fits 20%" in text
    assert "risk 114%" in text
    assert "no 13x*" in text
    assert "no start" in text
    assert "--max-num-seqs" in text
    assert "24,576 tokens: because" in text
    assert "hf_a" not in text
    assert text.isascii()
    assert "\x1b" not in text


def test_a_wide_grid_is_cut_into_tables_that_fit() -> None:
    """Of twenty contexts none is lost and no line is too long; a model that keeps nothing has no percentage."""
    lines = str(matrix_lines(_matrix(20))).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(f"{8192 * (n + 1):,}" in "\n".join(lines) for n in range(20))
    assert sum(line.startswith("  at most") for line in lines) == 3
    assert cell_text(_cell(8192, 8, CellState.FITS, None)) == "fits"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0%"), (0.0123, "1.2%"), (0.5, "50%"), (0.9996, "<100%"), (0.998, "99.8%"), (1, "100%"), (1.00001, ">100%"),
     (1.1, "110%"), (12.3, "12x"), (12345.6, "12,346x")],
)  # fmt: skip
def test_shares(share: float, text: str) -> None:
    """A full cache and one that is a hair from it do not read alike."""
    assert percent(share) == text


@each(
    ("workload", "more", "said"),
    [
        *((Workload(((1200, 300),), 64), {}, said) for said in (
            "fits: 64 at once, 1,200 prompt and 300 output tokens.",
            "217 fit at once (207 to 228 over the band): 94 blocks each, of 20,479",
            "29% at the end", "11.8 GiB", "1,024.0 GiB, and 2 would fit", "16 (in force)", "25.00 %",
        )),
        *((Workload(((1200, 300),), 250), {}, said) for said in ("may preempt: 250 at once", "Outputs grow", "preempts")),
        (Workload(((1200, 300),), 5000), {}, "not even the prompts fit"),
        (Workload(((1200, 300),), 5000), {}, "4,744 requests are beyond --max-num-seqs"),
        (Workload(((200_000, 1),), 1), {}, "too long"),
        (Workload(((1200, 300),), 64), {"starts": False}, "does not start"),
        (Workload(((1200, 300), (200_000, 1)), 2), {}, "1 of 2 requests is longer"),
        (Workload(((1200, 300), (100, 10)), None), {}, "of the average mixture"),
        (Workload(((1200, 300), (100, 10)), None), {}, "With prompts alone"),
        (Workload(((1200, 300),), 210), {}, "At the low end of the KV band it does not fit"),
        (Workload(((1200, 300),), 64), {"windows": True}, "189 blocks (94 full + 95 sliding)"),
        (Workload(((1200, 300),), 64), {"windows": True}, "Once all decode and windows have slid"),
    ],
)  # fmt: skip
def test_each_way_a_workload_fares_has_its_sentence(workload: Workload, more: dict[str, bool], said: str) -> None:
    """The verdict, the band, both figures of paging, the block in force, growth where it hurts, windows told apart."""
    lines = str(workload_lines(_answer(workload, **more))).splitlines()
    assert said in " ".join("\n".join(lines).split())
    assert max(map(len, lines)) <= WIDTH
