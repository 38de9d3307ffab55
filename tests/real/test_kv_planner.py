"""Our block arithmetic against vLLM 0.32's own planner, integer by integer; and starts that it refuses at the very edge."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.engine.kv_cases import FAMILIES, GIB, Case, published, random_case
from lab.engine.planner import PlannerProcess
from plimsoll.errors import BadInput
from plimsoll.findings import Code
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.files import read_model
from plimsoll.models.shape import LayerKind, ModelShape
from plimsoll.plan.findings import findings_of, stops_the_start
from plimsoll.plan.kv import KvPlan, WhyRefused, plan_kv
from plimsoll.plan.kv_layers import CannotGroupError, specs_of_all_stages
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings

CASES = int(os.environ.get("PLIMSOLL_KV_CASES", "600"))
CONFIGS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "model-configs"


def refused(answer: dict[str, Any]) -> WhyRefused | None:
    """Which memory check vLLM stopped at; None where it stopped at something else."""
    starts = {
        "No available memory for the cache blocks": WhyRefused.NO_MEMORY,
        "To serve at least one request": WhyRefused.TOO_LONG,
        "Cannot auto-fit max_model_len": WhyRefused.NOTHING_FITS,
    }
    return next((why for start, why in starts.items() if answer["message"].startswith(start)), None)


def same_refusal(plan: KvPlan, answer: dict[str, Any]) -> None:
    """Ours and vLLM's refusal have the same reason and the same numbers, as far as it prints them."""
    assert plan.refusal is not None, answer["message"]
    assert plan.refusal.why == refused(answer)
    if plan.refusal.why is WhyRefused.TOO_LONG:
        length, needed, available = re.findall(r"\((-?[\d.]+)\)?", answer["message"])[:3]
        assert int(length) == plan.max_model_len
        assert float(needed) == round(plan.refusal.needed_bytes / GIB, 2)
        assert float(available) == round(plan.refusal.available_bytes / GIB, 2)
        estimate = re.search(r"estimated maximum model length is (\d+)", answer["message"])
        assert plan.refusal.estimated_max_len == (int(estimate[1]) if estimate else 0)


def agree(planner: PlannerProcess, case: Case) -> str:
    """Assert that we say what vLLM says; returns in a word what that was."""
    answer = planner.plan(case.ranks, case.settings, case.available)
    try:
        plan = plan_kv(case.ranks, case.settings, case.available)
    except CannotGroupError as error:
        if answer["ok"]:
            pytest.fail(f"we refuse ({error}), vLLM does not")
        return "layers refused"  # where both the layers and the memory are bad, vLLM may name the memory first
    if not answer["ok"]:
        same_refusal(plan, answer)
        return "memory refused"
    assert plan.fits_one_request, plan.refusal
    assert answer["pages"] == [[spec.page_bytes for _, spec in rank] for rank in case.ranks]
    assert {plan.num_blocks} == set(answer["num_blocks"])
    assert list(plan.bytes_per_block_by_rank) == answer["bytes_per_block"]
    groups = [
        {"layers": group.layers, "block_size": group.block_size, "blocks": group.blocks_per_request} for group in plan.groups
    ]
    assert groups == answer["groups"]
    assert (plan.max_model_len, plan.tokens) == (answer["max_model_len"], answer["tokens"])
    assert plan.max_concurrency == answer["max_concurrency"]  # the very same float
    return "planned"


@pytest.mark.parametrize("case", list(published()), ids=lambda case: case.name)
def test_a_published_case_agrees(planner: PlannerProcess, case: Case) -> None:
    """A model people run gets vLLM's blocks, bytes, groups, tokens and concurrency."""
    assert agree(planner, case) == "planned"


def test_random_layers_agree(planner: PlannerProcess) -> None:
    """Hundreds of spec sets of every kind, new in each run, are planned and refused as vLLM plans and refuses them."""
    seed = int(os.environ.get("PLIMSOLL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"seed: PLIMSOLL_SEED={seed}")
    dice = random.Random(seed)
    said: Counter[str] = Counter()
    families: Counter[str] = Counter()
    for number in range(CASES):
        case = random_case(dice)
        try:
            said[agree(planner, case)] += 1
        except AssertionError as error:
            specs = Counter(spec for rank in case.ranks for _, spec in rank)
            pytest.fail(f"PLIMSOLL_SEED={seed}, case {number} ({case.name}): {error}\n{case.settings}\n{specs}")
        families[case.name] += 1
    print(f"{CASES} cases: {dict(said)}; {dict(families)}")
    assert said["planned"] >= 100
    assert said["memory refused"] >= 20
    assert set(families) == set(FAMILIES)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared data folder is not beside the repository")
def test_the_layers_of_public_models_agree(planner: PlannerProcess) -> None:
    """What we read from a hundred public configs is planned by vLLM as we plan it, alone and split over ranks."""
    said: Counter[str] = Counter()
    for path in sorted(CONFIGS.glob("*.json")):
        model = ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
        for tp, pp, mtp in ((1, 1, 0), (4, 1, 1), (2, 3, 0)):
            settings = Settings(
                max_model_len=model.default_context, tensor_parallel=tp, pipeline_parallel=pp,
                hybrid_manager=model.chunk_size is None, interleaved=LayerKind.MLA_COMPRESSED in model.kinds,
                speculative={"method": "mtp", "num_speculative_tokens": mtp} if mtp else None,
            )  # fmt: skip
            try:
                ranks = specs_of_all_stages(replace(model, mtp_layers=mtp), settings)
            except BadInput:
                continue  # TP does not divide its heads
            said[agree(planner, Case(path.stem, ranks, settings, (40 * GIB,) * pp))] += 1
    print(dict(said))
    assert said["planned"] >= 100
    assert not said["layers refused"]


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
    return Code.STARTUP_NO_CACHE_BLOCKS if refused(answer) is WhyRefused.NO_MEMORY else Code.STARTUP_CONTEXT_TOO_LONG


def test_starts_at_the_edge_are_called_as_vllm_calls_them(planner: PlannerProcess) -> None:
    """The longest context that fits is granted; what is too long is refused, or warned of where the band leaves it open."""
    said: Counter[str] = Counter()
    for name in MODELS:
        model = ModelFacts(name, ModelShape.from_config(read_model(name, hub=None).config))
        for card_name in CARDS:
            gpu = gpu_named(card_name)
            card = Card(gpu.name, gpu.total_bytes, gpu.total_low_bytes, gpu.total_high_bytes, gpu.compute_capability)
            settings = read_settings(Flags(read_command_line(["m"], RELEASE), RELEASE), {}, model.shape, card)
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
