"""Where model and card are known, doctor plans the very server a log is of, and asks nobody for it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.answers import HEALTHY, ask
from tests.each import cases, each

MODEL = "Qwen/Qwen2.5-7B-Instruct"
HEAD, TAIL, TOO_LONG, OUT_OF_MEMORY = cases("cli", "lines_of_starts")


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection or looks up a name in these tests fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def log_of(folder: Path, text: str, model: str = MODEL, flags: str = "'max_model_len': 32768") -> str:
    """A start that failed, as a file."""
    path = folder / "start.log"
    path.write_text((HEAD + text + TAIL).format(model=model, flags=flags))
    return str(path)


def test_the_plan_of_the_failed_server_is_among_the_facts(tmp_path: Path) -> None:
    """A bundled model and a card give the weights, the cache and the total that `plan` computes for that very command."""
    log = log_of(tmp_path, TOO_LONG)
    answer = ask("doctor --gpu L4 --json", log, code=1)
    assert answer.codes[0] == "startup.context-too-long"
    plan = answer.body["facts"]["plan"]
    assert 15.0e9 < plan["weights_bytes"] < 15.6e9
    assert 22 << 30 <= plan["total_bytes"] <= 24 << 30
    assert plan["requested_bytes"] < plan["total_bytes"]
    assert "plan computes for this command" in ask("doctor --gpu L4", log, code=1).out
    answer = ask("doctor --gpu-memory-gib 17 --json", log, code=1)
    values = [one["value"] for one in answer.body["findings"][0]["remedy"] if one["flag"] == "--max-model-len"]
    numbers = [int(value) for value in values if value.isdecimal()]
    assert numbers, "what to do comes as flags with numbers"
    assert all(1024 <= number <= 21152 for number in numbers), "the context is not longer than what fits"


def test_the_card_in_torchs_own_words_is_enough_for_a_plan(tmp_path: Path) -> None:
    """No --gpu is needed; where nothing failed for memory, nothing is computed."""
    answer = ask("doctor --json", log_of(tmp_path, OUT_OF_MEMORY), code=1)
    assert answer.codes[0] == "startup.weights-do-not-fit"
    for part in ("gpu", "plan"):
        assert answer.body["facts"][part]["total_bytes"] == pytest.approx(11.6 * (1 << 30), rel=1e-3)
    assert "plan" not in ask("doctor --gpu L4 --json", HEALTHY).body["facts"]


@each("model", ["nobody/knows-this", "/models/gone", "../../etc", "m", "a/b/c", ""])
def test_a_model_that_is_not_at_hand_is_no_obstacle(model: str, tmp_path: Path) -> None:
    """The log's own figures must do; the answer is the same, without a plan of weights."""
    answer = ask("doctor --gpu L4 --json", log_of(tmp_path, TOO_LONG, model), code=1)
    assert answer.codes[0] == "startup.context-too-long"
    assert answer.body["facts"].get("plan") is None


@each(
    "flags",
    ["'max_model_len': 'many'", "'tensor_parallel_size': 0", "'gpu_memory_utilization': 40", "'max_model_len': -5",
     "'quantization': 'none-such'", "'tensor_parallel_size': 99999999999", "'hf_overrides': {'a': object()}", "'port'"],
)  # fmt: skip
def test_flags_that_make_no_sense_do_not_hurt(flags: str, tmp_path: Path) -> None:
    """A plan that cannot be made is left out; the diagnosis stands."""
    answer = ask("doctor --gpu L4 --json", log_of(tmp_path, TOO_LONG, flags=flags), code=1)
    assert answer.codes[0] == "startup.context-too-long"
