"""Our block arithmetic against vLLM 0.32's own planner, integer by integer."""

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
from plimsoll.models.shape import LayerKind, ModelShape
from plimsoll.plan.kv import KvPlan, WhyRefused, plan_kv
from plimsoll.plan.kv_layers import CannotGroupError, specs_of_all_stages
from plimsoll.plan.settings import Settings

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


def ours(case: Case) -> KvPlan | CannotGroupError:
    """Our plan, or why we make none."""
    try:
        return plan_kv(case.ranks, case.settings, case.available)
    except CannotGroupError as error:
        return error


def agree(case: Case, answer: dict[str, Any]) -> str:
    """Assert that we say what vLLM says; returns in a word what that was."""
    plan = ours(case)
    if isinstance(plan, CannotGroupError):
        assert not answer["ok"], f"we refuse ({plan}), vLLM does not"
        # Where both the layers and the memory are bad, vLLM may name the memory first.
        return "layers refused"
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
    assert plan.max_model_len == answer["max_model_len"]
    assert plan.tokens == answer["tokens"]
    assert plan.max_concurrency == answer["max_concurrency"]  # the very same float
    return "planned"


@pytest.mark.parametrize("case", list(published()), ids=lambda case: case.name)
def test_a_published_case_agrees(planner: PlannerProcess, case: Case) -> None:
    """A model people run gets vLLM's blocks, bytes, groups, tokens and concurrency."""
    assert agree(case, planner.plan(case.ranks, case.settings, case.available)) == "planned"


def test_random_layers_agree(planner: PlannerProcess) -> None:
    """Hundreds of spec sets of every kind, new in each run, are planned and refused as vLLM plans and refuses them."""
    seed = int(os.environ.get("PLIMSOLL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"seed: PLIMSOLL_SEED={seed}")
    dice = random.Random(seed)
    said: Counter[str] = Counter()
    families: Counter[str] = Counter()
    for number in range(CASES):
        case = random_case(dice)
        answer = planner.plan(case.ranks, case.settings, case.available)
        try:
            said[agree(case, answer)] += 1
        except AssertionError as error:
            shown = {key: value for key, value in answer.items() if key != "pages"}
            specs = Counter(spec for rank in case.ranks for _, spec in rank)
            pytest.fail(f"PLIMSOLL_SEED={seed}, case {number} ({case.name}): {error}\n{case.settings}\n{specs}\n{shown}")
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
            case = Case(path.stem, ranks, settings, (40 * GIB,) * pp)
            said[agree(case, planner.plan(case.ranks, case.settings, case.available))] += 1
    print(dict(said))
    assert said["planned"] >= 100
    assert not said["layers refused"]
