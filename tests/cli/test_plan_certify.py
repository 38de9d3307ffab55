"""`plimsoll plan --certify` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from plimsoll.cli.main import main
from plimsoll.inside.door import read_certificate, why_foreign

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CARD = ["plan", "--certify", "--gpu", "H200", "--vllm", "0.25.1"]
FIRST = ["--", "env", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", LLAMA, "--max-model-len", "8192"]
SECOND = ["--", "vllm", "serve", LLAMA, "--max-model-len", "8192"]


def test_a_command_is_certified_or_the_smallest_request_that_breaks_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and exit 0, or the flag that closes it and exit 1."""
    assert main([*CARD, *SECOND]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Certified: no admitted request can exceed the card\n")
    assert "no new one comes" in out
    assert "v1/worker/gpu/sample/prompt_logprob.py" in out
    assert main([*CARD, *FIRST]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Not certified: 1 kind of request can exceed the card\n")
    assert "tokens with prompt_logprobs" in out
    assert "closed by: --max-num-batched-tokens" in out
    assert "all of them closed by: --gpu-memory-utilization 0.8" in out


def test_an_unknown_term_or_a_refused_command_is_not_certified(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is open and something is not known; a flag that the release does not have: plan says why."""
    assert main([*CARD, *SECOND, "--logits-processors", "my.Processor"]) == 1
    assert capsys.readouterr().out.startswith("Not certified: --logits-processors: processors of your own")
    assert main([*CARD, *SECOND, "--swap-space", "4"]) == 1
    assert capsys.readouterr().out.startswith("Not certified: vLLM would not start with it")


def test_the_json_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """Terms, spare, kinds and assumptions in one object; the terms add up to the spare memory."""
    assert main([*CARD, "--json", *FIRST]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.certify/1"
    assert body["certified"] is False
    assert sum(term["bytes"] for term in body["terms"]) == body["spare_bytes"]
    assert all(term["source"] for term in body["terms"])
    (asked,) = [kind for kind in body["kinds"] if kind["smallest"] is not None]
    assert asked["kind"] == "prompt_logprobs"
    assert asked["request"] == f"a prompt of {asked['smallest']:,} tokens with prompt_logprobs"
    assert body["closes_all"].startswith("--gpu-memory-utilization")
    assert body["assumptions"]


def test_the_door_s_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds what the door reads; kinds that no request can exceed cost nothing there."""
    table = tmp_path / "certificate.json"
    assert main([*CARD, "--table", str(table), *FIRST]) == 1
    capsys.readouterr()
    body = json.loads(table.read_text(encoding="utf-8"))
    assert body["schema"] == "plimsoll.certificate/1"
    assert {"vllm", "model", "gpu", "made", "certified", "spare_bytes", "assumes", "kinds"} <= set(body)
    assert {"free_bytes_at_start", "neighbours_bytes", "pieces_bytes", "max_num_batched_tokens", "max_num_seqs"} <= set(
        body["assumes"]
    )
    keys = {"kind", "unit", "fixed_bytes", "bytes_per_unit", "most_units", "scope", "smallest", "closes", "source"}
    for kind in body["kinds"]:
        assert set(kind) == keys
        cost = kind["fixed_bytes"] + kind["bytes_per_unit"] * kind["most_units"]
        assert (cost > body["spare_bytes"]) == (kind["smallest"] is not None)


def test_the_door_reads_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own reader takes the file, and holds it for the engine of this command and for no other."""
    table = tmp_path / "certificate.json"
    main([*CARD, "--table", str(table), *SECOND])
    capsys.readouterr()
    found = read_certificate(str(table))
    engine = SimpleNamespace(
        model_config=SimpleNamespace(model=LLAMA, max_model_len=8192, max_logprobs=20),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=1024),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.92),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        lora_config=None,
        use_v2_model_runner=True,
    )
    assert why_foreign(found, "0.25.1", engine) == ""
    engine.scheduler_config.max_num_seqs = 512
    assert "max_num_seqs" in why_foreign(found, "0.25.1", engine)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--certify", "--table", "/nowhere/at/all.json", "--gpu", "H200", *SECOND], "/nowhere/at/all.json"),
        (["plan", "--table", "t.json", "--gpu", "H200", *SECOND], "--certify"),
        ([*CARD, "--matrix", "context=8k concurrency=8", *SECOND], "--matrix"),
        ([*CARD, "--", "vllm", "serve"], "model"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line that says what is wrong."""
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1
