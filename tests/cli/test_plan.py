"""`plimsoll plan` as a user meets it: one command, several side by side, and a certificate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.door import read_certificate, why_foreign
from tests.cli.answers import CAPTURES, LLAMA, ask
from tests.models.hub_server import running

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def planned(words: str, *more: str) -> dict[str, Any]:
    """The JSON of a command on an H100."""
    return ask(f"plan --gpu H100 --json -- vllm serve {words}", *more).body


def test_overrides_of_the_model_and_a_config_file_count(tmp_path: Path) -> None:
    """--hf-overrides changes the shape and may name a file; what `vllm serve --config FILE` would read is planned too."""
    one_layer = planned(LLAMA, "--hf-overrides", '{"num_hidden_layers": 1}')
    assert planned(LLAMA)["kv"]["bytes_per_block"] == 32 * one_layer["kv"]["bytes_per_block"]
    planned(f"{LLAMA} --quantization awq", "--hf-overrides", '{"quantization_config_file": "quant.json"}')
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-len: 4096\nmax-num-seqs: 7\n", encoding="utf-8")
    from_flags = planned(f"{LLAMA} --max-model-len 4096 --max-num-seqs 9")
    for form in (f"--config {path}", f"--config={path}"):
        from_file = planned(f"{LLAMA} {form} --max-num-seqs 9")  # the command line wins
        assert (from_file["kv"], from_file["ledger"]) == (from_flags["kv"], from_flags["ledger"])


def test_the_tag_of_the_image_names_the_release(tmp_path: Path) -> None:
    """A launch in a container is planned for the vLLM of its image, and the plan says so; --vllm wins."""
    path = tmp_path / "compose.yaml"
    path.write_text(
        f"services: {{chat: {{image: 'vllm/vllm-openai:v0.11.0', command: --model {LLAMA} --max-model-len 8192}}}}\n",
        encoding="utf-8",
    )
    plan = ask(f"plan --gpu H100 --json {path}").body
    assert plan["vllm"] == "0.11.0"
    assert "planned for vLLM 0.11.0: the tag of the image vllm/vllm-openai:v0.11.0" in plan["notes"]
    assert ask(f"plan --gpu H100 --json --vllm 0.20.0 {path}").body["vllm"] == "0.20.0"


def test_every_offer_makes_a_start() -> None:
    """With neighbours on a small card an offer names all that belongs to it, and is as good as its word."""
    words = f"plan --gpu L40S --used-gib 15 --json -- vllm serve {LLAMA}"
    advice = ask(words, code=1).body["advice"]
    assert len(advice) > 1
    for offer in advice:
        assert offer["flag"] == "--gpu-memory-utilization"
        ask(words, *(word for one in (offer, *offer["also"]) for word in (one["flag"], one["value"])))


def test_a_page_is_written_to_what_is_there(tmp_path: Path) -> None:
    """A link is followed and a device is not replaced; nothing is left behind when the target is a folder."""
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    for target, code in ((link, 0), (Path("/dev/null"), 0), (tmp_path, 3)):
        ask(f"plan --gpu H100 --html {target} vllm serve {LLAMA}", code=code)
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not Path("/dev/null").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"real.html", "link.html"}


def test_a_real_start_narrows_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--learn on the log of a real H200 start shows the terms, the next plan is narrower, --forget brings the old one back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG), encoding="utf-8")
    words = f"--gpu H200 --vllm 0.25.1 --json -- vllm serve {tmp_path} --max-model-len 8192"

    def band() -> int:
        kv = ask(f"plan {words}").body["ledger"]["kv"]
        assert kv["low"] <= 112.28 * 2**30 <= kv["high"]
        return int(kv["high"] - kv["low"])

    before = band()
    learned = ask(f"plan --learn {CAPTURES / 'vllm-0.25.1-h200' / 'base.log'} {words}").body["learned"]
    assert {row["term"] for row in learned} >= {"weights", "kv"}
    assert band() < before / 2
    assert ask("plan --forget").out == "forgot 1 correction\n"
    assert band() == before


def test_the_revision_of_the_command_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve --revision` names another shape of a bundled model: the hub is asked for that one."""
    for name, value in {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        ask(f"plan --gpu H100 --vllm 0.32.0 vllm serve {LLAMA} --revision refs/pr/7", code=None)
        assert hub.seen[0][0] == f"/{LLAMA}/resolve/refs%2Fpr%2F7/config.json"


# Several commands side by side.


def test_a_refused_flag_is_shown_and_called_what_a_plan_alone_calls_it(tmp_path: Path) -> None:
    """The flag that only one start has stands under its letter as it was written, and memory is not blamed for it."""
    command = f"vllm serve {LLAMA} --max-model-len 8K"
    (tmp_path / "two.txt").write_text(f"{command}\n{command} --swap-space 4\n", encoding="utf-8")
    lines = ask(f"plan --gpu H100 --vllm 0.32.0 --compare {tmp_path / 'two.txt'}", code=1).out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split() == ["A", "B"])
    assert lines[head + 1].strip() == "--swap-space 4"
    assert lines[head + 2].split() == ["*", "verdict", "fits", "does", "not", "start"]


# --certify

CERTIFY = "plan --certify --gpu H200 --vllm 0.25.1"
SECOND = f"-- vllm serve {LLAMA} --max-model-len 8192"
FIRST = f"-- env VLLM_USE_V2_MODEL_RUNNER=0 vllm serve {LLAMA} --max-model-len 8192"


def test_the_doors_table(tmp_path: Path) -> None:
    """The file holds what the door reads, for the engine of this command and for no other."""
    table = tmp_path / "certificate.json"
    ask(f"{CERTIFY} --table {table} {FIRST}", code=1)
    body = json.loads(table.read_text(encoding="utf-8"))
    assert body["schema"] == "plimsoll.certificate/1"
    assert {"vllm", "model", "gpu", "made", "certified", "spare_bytes", "assumes", "kinds"} <= set(body)
    names = "free_bytes_at_start neighbours_bytes pieces_bytes max_num_batched_tokens max_num_seqs"
    assert set(names.split()) <= set(body["assumes"])
    keys = "kind unit fixed_bytes bytes_per_unit most_units scope smallest closes source"
    for kind in body["kinds"]:
        assert set(kind) == set(keys.split())
        cost = kind["fixed_bytes"] + kind["bytes_per_unit"] * kind["most_units"]
        assert (cost > body["spare_bytes"]) == (kind["smallest"] is not None), "a kind that cannot exceed costs nothing there"
    ask(f"{CERTIFY} --table {table} {SECOND}")
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
