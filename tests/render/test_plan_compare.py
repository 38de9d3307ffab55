"""Plans side by side."""

from __future__ import annotations

import json
import re

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.check_flags import check
from plimsoll.launch.command_line import EntryPoint, Launch, read_command_line
from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import ModelFacts, plan_ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.settings import Card, Flags, read_settings
from plimsoll.render.plan import ComparedPlan, compare_as_json, compare_as_text, letter
from plimsoll.render.terminal import WIDTH
from plimsoll.units import GIB
from plimsoll.vllm.versions import engine_named

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA = ModelFacts("llama", ModelShape.from_config(CONFIG))
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


def _planned(*flags: str, model: str = "org/llama", gib: int = 79) -> MemoryPlan:
    card = Card("H100", gib * GIB, gib * GIB, gib * GIB, (9, 0))
    line = read_command_line(["m", *flags], "0.32.0")
    ledger = plan_ledger(LLAMA, read_settings(Flags(line, "0.32.0"), {}, LLAMA.shape, card), card)
    checked = check(Launch("command line", EntryPoint.SERVE, (model, *flags)), engine_named("0.32.0"))
    trouble = Finding(Code.STARTUP_CONTEXT_TOO_LONG, Severity.CRITICAL, 0.9, "one request does not fit", "it is long")
    return MemoryPlan(model, ledger, [] if ledger.fits else [trouble], [], checked, LLAMA.shape)


def _line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip(" *").startswith(name))


def test_rows_that_differ_are_marked() -> None:
    """With by how much, in GiB; two equal commands have no mark, and the text says so."""
    text = str(compare_as_text([ComparedPlan("f:1", _planned()), ComparedPlan("f:2", _planned("--kv-cache-dtype", "fp8"))]))
    assert _line(text, "kv-cache-dtype").split() == ["*", "kv-cache-dtype", "auto", "fp8"]
    assert _line(text, "bytes per block").split()[-2:] == ["2,097,152", "1,048,576"]
    assert _line(text, "KV tokens").lstrip().startswith("*")
    assert _line(text, "GPU").lstrip().startswith("GPU")
    assert "B  f:2: vllm serve org/llama --kv-cache-dtype fp8" in text
    both = [ComparedPlan("f:1", _planned()), ComparedPlan("f:2", _planned("--gpu-memory-utilization", "0.82"))]
    text = str(compare_as_text(both))
    assert "(-7.90)" in _line(text, "requested")
    assert "(-7.90)" in _line(text, "KV cache")
    assert _line(text, "weights").lstrip().startswith("weights")
    text = str(compare_as_text([ComparedPlan("f:1", _planned()), ComparedPlan("f:2", _planned())]))
    assert [line for line in text.splitlines() if line.lstrip().startswith("* ")] == [text.splitlines()[-1]]
    assert "nothing differs" in text


def test_a_line_that_cannot_be_planned_stays_in_its_place() -> None:
    """One bad line does not hide the others; it is neither a plan nor a difference."""
    both = [ComparedPlan("f:1", _planned()), ComparedPlan("f:2", None, f"no such\nmodel {SECRET}")]
    text, body = str(compare_as_text(both)), json.loads(compare_as_json(both))
    assert "B  f:2: not planned: no such model [redacted]" in text
    assert "nothing differs" in text
    assert body["compare"][1]["plan"] is None
    assert body["compare"][1]["problem"] == "no such model [redacted]"
    assert body["fits"] is False


def test_findings_are_listed_by_letter() -> None:
    """What stops a plan is named under the table; the alphabet goes round."""
    text = str(compare_as_text([ComparedPlan("f:1", _planned()), ComparedPlan("f:2", _planned(gib=20))]))
    assert _line(text, "verdict").split() == ["*", "verdict", "fits", "does", "not", "fit"]
    assert "  B  startup.context-too-long: one request does not fit" in text
    assert [letter(n) for n in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]


def test_many_plans_fit_the_screen() -> None:
    """Many plans make several tables, each beside the first plan, none wider than a screen."""
    plans = [ComparedPlan(f"f:{n}", _planned()) for n in range(8)]
    text = str(compare_as_text([*plans, ComparedPlan("f:9", _planned("--enforce-eager"))]))
    assert max(map(len, text.splitlines())) <= WIDTH
    heads = [line.split() for line in text.splitlines() if re.fullmatch(r" {20,}A( +[B-I])+", line)]
    assert len(heads) > 1
    assert [letter for head in heads for letter in head[1:]] == list("BCDEFGHI")
    assert sum("* eager" in " ".join(line.split()) for line in text.splitlines()) == len(heads)


def test_the_json_has_whole_plans_and_raw_differences() -> None:
    """Every plan is there as `plan --json` has it, and differences are numbers, not words."""
    body = json.loads(
        compare_as_json([ComparedPlan("f:1", _planned()), ComparedPlan("f:2", _planned("--max-model-len", "8192"))])
    )
    assert body["schema"] == "plimsoll.plan/1"
    assert body["fits"] is True
    assert [one["plan"]["settings"]["max_model_len"] for one in body["compare"]] == [131072, 8192]
    assert {"what": "max-model-len", "values": [131072, 8192]} in body["differences"]


def test_hostile_and_secret_text() -> None:
    """Control characters and tokens in a model's name reach neither the table nor the JSON."""
    one = ComparedPlan("f\x1b[31m:1", _planned(model=f"a\x1b[2J\n{SECRET}"))
    for text in (str(compare_as_text([one])), compare_as_json([one])):
        assert "\x1b" not in text
        assert "\\u001b" not in text
        assert SECRET not in text
