"""The proof on a real GPU, replayed from what it left: starts, lines and failures against plan and doctor as they are today."""

from __future__ import annotations

import json
import operator
from typing import Any

from lab.gpu.measure_overhead import MODELS as FITTED
from lab.proof.foresee import ENTRIES
from lab.proof.score import ROOT, Run, earlier, failures, foresight, held, is_right, lines, report, runs, score, starts
from tests.each import each

TOLD: dict[str, Any] = json.loads(ENTRIES.read_text(encoding="utf-8"))
# What a launch command cannot tell: what requests ask for, neighbours that come or go later, a kill, a sleep.
NAME = operator.attrgetter("name")
NOT_IN_THE_COMMAND = {"logits", "neighbour", "profile-neighbour", "engine-killed", "wake-up"}


def test_every_run_was_made_none_was_fitted_and_the_page_shows_what_was_foreseen() -> None:
    """Each entry has its run, an edge both sides; 14 starts over 6 shapes; two broke their promise then, and that is kept."""
    wanted = {
        f"{entry['name']}{ending}"
        for entry in (*TOLD["entries"], *TOLD["second"])
        for ending in (("-inside", "-outside") if entry["kind"] == "edge" else ("",))
    }
    assert {run.name for run in runs()} == wanted
    models = {run.told["model"] for run in starts()}
    assert len(starts()) >= 14
    assert len(models) >= 6
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_key_value_heads")
    # Mixtral was fitted with two layers only, so the whole model is another shape.
    fitted = {tuple(config[size] for size in sizes) for name, config in FITTED.items() if name != "MIX"}
    for name in models:
        own = TOLD["models"][name]
        config = TOLD["models"][own["like"]] | own if "like" in own else own
        quantised = "quantization_config" in config
        assert quantised or tuple(config[size] for size in sizes) not in fitted, name
    for chosen in (starts(), *([run for run in starts() if run.told["half"] == half] for half in "abc")):
        near = [run.name for run in chosen if score(run, run.today).is_near]
        assert len(near) / len(chosen) >= 12 / 14, near
    broke = {run.name for run in starts() if not score(run, run.before).is_safe}
    assert broke == {"gemma-3-graphs", "llama-3-70b-int4-graphs"}
    assert {pair[0].name for pair in lines() if not held(*pair)} == {"free-memory-inside", "fixed-cache-inside"}
    assert report() in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


@each("run", starts, ids=NAME)
def test_no_start_was_promised_memory_that_is_not_there(run: Run) -> None:
    """Overhead is never under by more than 0.3 GiB, the KV cache never over by more than 0.5 % of the card."""
    assert run.served
    assert run.today["fits"]
    assert score(run, run.today).is_safe, score(run, run.today)


@each("run", lambda: failures() + earlier(), ids=NAME)
def test_doctor_names_every_failure_first_and_plan_foresees_what_can_be(run: Run) -> None:
    """No failure that lies in the command passes without a word; what the command cannot tell is not guessed at."""
    assert is_right(run), (run.said, run.right)
    assert (foresight(run, run.today) == "no") == (run.name in NOT_IN_THE_COMMAND)


@each("pair", lines, ids=lambda pair: str(pair[0].name.removesuffix("-inside")))
def test_plan_is_on_the_right_side_of_every_line(pair: tuple[Run, Run]) -> None:
    """Where plan is sure of a side, the real engine was on it."""
    inside, outside = pair
    if not held(inside, outside):
        assert inside.side != 1
    assert outside.side == -1
    assert outside.right
