"""Starts that vLLM's own planner refuses or grants, provoked at the very edge, against what plan says of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lab.engine.planner import PlannerProcess
from plimsoll.findings import Code
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.files import read_model
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import findings_of, stops_the_start
from plimsoll.plan.kv_layers import specs_of_all_stages
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings

RELEASE = "0.32.0"
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3",
    "google/gemma-2-9b-it", "google/gemma-3-4b-it", "openai/gpt-oss-20b", "microsoft/phi-4",
)  # fmt: skip
CARDS = ("L4", "RTX 4090", "A100-40G", "L40S", "H100")


def _plan(model: ModelFacts, card: Card, settings: Settings) -> tuple[Ledger, set[Code], set[Code]]:
    """The ledger, the codes that stop the start, and all: what only a part of the band refuses is a warning."""
    ledger = plan_ledger(model, settings, card)
    findings = list(findings_of(ledger, model.shape, (), {}))
    return ledger, {f.code for f in findings if stops_the_start(f)}, {f.code for f in findings}


def _says(planner: PlannerProcess, model: ModelFacts, ledger: Ledger) -> Code | None:
    """What vLLM's planner makes of the same layers and the same bytes."""
    ranks = specs_of_all_stages(model.shape, ledger.settings)
    answer = planner.plan(ranks, ledger.settings, (max(ledger.kv.value, 0),) * len(ranks))
    if answer["ok"]:
        return None
    return (
        Code.STARTUP_NO_CACHE_BLOCKS if answer["message"].startswith("No available memory") else Code.STARTUP_CONTEXT_TOO_LONG
    )


def test_starts_at_the_edge_are_called_as_vllm_calls_them(planner: PlannerProcess) -> None:
    """The longest context that fits is granted; what is too long is refused, or warned of where the band leaves it open."""
    said: Counter[str] = Counter()
    for name in MODELS:
        model = ModelFacts(name, ModelShape.from_config(read_model(name, hub=None).config))
        for card_name in CARDS:
            gpu = gpu_named(card_name)
            card = Card(gpu.name, gpu.total_bytes, gpu.total_low_bytes, gpu.total_high_bytes, gpu.compute_capability)
            line = read_command_line(["m"], RELEASE)
            settings = read_settings(Flags(line, RELEASE), {}, model.shape, card)
            at_most = plan_ledger(model, settings, card).kv_plan.largest_context_that_fits
            edge = [replace(settings, max_model_len=at_most), replace(settings, max_model_len=at_most + 32)] if at_most else []
            small = plan_ledger(model, settings, card)
            share = (small.requested.value - small.kv.value - (64 << 20)) / card.total_bytes
            for changed in (settings, *edge, replace(settings, utilization=share)):
                if not 0 < changed.utilization <= 1 or changed.max_model_len > model.shape.max_context:
                    continue
                ledger, codes, told = _plan(model, card, changed)
                if Code.STARTUP_WEIGHTS_DO_NOT_FIT in codes:
                    continue  # it fails before the cache is looked at
                truth = _says(planner, model, ledger)
                where = (name, card_name, changed.max_model_len, changed.utilization, codes, told, truth)
                assert codes & {Code.STARTUP_CONTEXT_TOO_LONG, Code.STARTUP_NO_CACHE_BLOCKS} <= {truth}, where
                assert truth is None or truth in told, where
                said["granted" if truth is None else truth.value] += 1
    print(dict(said))
    assert sum(count for what, count in said.items() if what != "granted") >= 30
    assert said["granted"] >= 30
