"""`plimsoll plan` as a user meets it: one command, several side by side, and a certificate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.door import read_certificate, why_foreign
from plimsoll.render.terminal import WIDTH
from tests.cli.answers import CAPTURES, LLAMA, ask
from tests.each import each
from tests.models.hub_server import running

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
SMALL_CONFIG = LLAMA_CONFIG | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 2048, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
DRAFTER = "--speculative-config.num_speculative_tokens 3 --speculative-config.model"


def planned(words: str, *more: str, options: str = "", code: int = 0) -> dict[str, Any]:
    """The JSON of a command on an H100."""
    return ask(f"plan --gpu H100 --json {options} -- vllm serve {words}", *more, code=code).body


def test_a_bundled_model_on_a_known_card() -> None:
    """Offline, by name, in words: the verdict, the bar, the terms, the blocks."""
    out = ask(f"plan --gpu H100 --vllm 0.32.0 vllm serve {LLAMA} --max-model-len 32k").out
    assert out.startswith(f"fits: {LLAMA} on H100")
    assert ("KV cache" in out, "blocks of 16 tokens" in out) == (True, True)


def test_the_json_contract() -> None:
    """One object with the promised keys; the terms add up to what was requested."""
    body = ask(f"plan --gpu L4 --vllm 0.32.0 --json -- vllm serve {LLAMA} --swap-space 4", code=1).body
    assert (body["schema"], body["fits"], body["gpu"]["count"]) == ("plimsoll.plan/1", False, 1)
    ledger = {name: term["value"] for name, term in body["ledger"].items()}
    assert sum(ledger[n] for n in ("weights", "non_torch", "activation", "graphs", "kv")) == ledger["requested"]
    assert {"block_size", "bytes_per_block", "num_blocks", "tokens", "max_concurrency", "groups"} <= set(body["kv"])
    assert {"startup.bad-flag", "startup.context-too-long"} <= {finding["code"] for finding in body["findings"]}
    assert body["flags"]["items"][0]["status"] == "removed"
    assert set(body["advice"][0]) == {"flag", "value", "why", "effect"}


def test_whispers_concurrency_is_unknown() -> None:
    """Where the cross-attention of each request is not counted, no number of requests is printed."""
    serve = "--gpu L4 --vllm 0.32.0 -- vllm serve openai/whisper-large-v3"
    assert ask(f"plan --json {serve}").body["kv"]["max_concurrency"] is None
    assert "how many requests fit at once is not known" in ask(f"plan {serve}").text


def test_a_local_folder(tmp_path: Path) -> None:
    """A folder with a config.json is enough, and its name may be given in a script."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG), encoding="utf-8")
    script = tmp_path / "start.sh"
    script.write_text(f"MODEL={tmp_path}\nvllm serve $MODEL --gpu-memory-utilization 0.5\n", encoding="utf-8")
    body = ask(f"plan --gpu-memory-gib 8 --json {script}").body
    assert (body["gpu"]["total_bytes"], body["ledger"]["requested"]["value"]) == (8 * 2**30, 4 * 2**30)


def test_what_the_world_does_not_have_is_exit_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model nobody has, and a page that cannot be written: one line."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no/such-model" in ask("plan --gpu H100 vllm serve no/such-model", code=3).line
    assert "p.html" in ask(f"plan --gpu H100 --html /no/such/folder/p.html vllm serve {LLAMA}", code=3).line


def test_an_upgrade_shows_what_it_does_to_the_cache() -> None:
    """--from plans the command in both releases: 0.20.0 raised the share and began to set graph memory aside."""
    words = f"--gpu H100 --from 0.19.0 --vllm 0.25.1 vllm serve {LLAMA}"
    body = ask(f"plan --json {words}").body
    assert body["from"]["vllm"] == "0.19.0"
    assert body["from"]["tokens"] != body["kv"]["tokens"]
    assert "From 0.19.0 to 0.25.1: KV" in ask(f"plan {words}").out


def test_a_workload_a_matrix_and_a_page(tmp_path: Path) -> None:
    """One run answers for a workload, draws the matrix and writes the page; the JSON carries both; bad news is exit 1."""
    page = tmp_path / "plan.html"
    words = (
        "plan --gpu L40S --vllm 0.25.1 --workload prompt=1200,output=300,concurrency=64 --matrix context=8k,32k "
        f"concurrency=8..64 vllm serve {LLAMA} --max-model-len 32k"
    )
    out = ask(f"{words} --html {page}").out
    assert ("Paging saves" in out, "at most" in out) == (True, True)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    body = ask(f"{words} --json").body
    assert (body["workload"]["verdict"], len(body["matrix"]["cells"]) > 0) == ("fits", True)
    large = "prompt=8000,output=100,concurrency=500"
    out = ask(f"plan --gpu L4 --workload {large} vllm serve {LLAMA} --max-model-len 16k", code=1).out
    assert out.startswith("fits, but not this workload: ")


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    """The lengths of recorded requests are judged at the concurrency asked for; when they came is another command's."""
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,374,44\n2,396,109\n3,1500,20\n", encoding="utf-8")
    assert planned(LLAMA, options=f"--workload {trace}:concurrency=100")["workload"]["verdict"] == "fits"
    text = ask(f"plan --gpu H100 --workload {trace} vllm serve {LLAMA}").text
    assert "When they came is not looked at here: `plimsoll simulate` replays that." in text


def test_a_draft_model_is_counted_or_said_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter we know is in the weights and in the matrix; one we cannot find is a note."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for drafter, known in (("meta-llama/Llama-3.2-1B-Instruct", True), ("no/such-drafter", False)):
        body = planned(f"{LLAMA} {DRAFTER} {drafter}")
        assert (body["ledger"]["weights"]["value"] > 17 * 2**30) is known
        assert any("not in these figures" in note for note in body["notes"]) is not known
    words = f"{LLAMA} --max-model-len 32k {DRAFTER} meta-llama/Llama-3.2-1B-Instruct"
    body = planned(words, options="--matrix 'context=32k concurrency=8'")
    of_one = sum(group["blocks_per_request"] for group in body["kv"]["groups"])
    assert body["matrix"]["at_once"] == [(body["kv"]["num_blocks"] - 1) // of_one]


def test_the_first_line_tells_what_stops_a_start() -> None:
    """Memory from flags, and both where both do; a plan that hangs on its estimate names a context that starts there too."""
    serve = f"plan --gpu L4 --vllm 0.32.0 vllm serve {LLAMA} --max-model-len"
    assert ask(f"{serve} 26000 --json").body["kv"]["fits_at_low_end"] is False
    out = ask(f"{serve} 26000").out
    assert out.startswith(f"fits by the estimate, not at its low end: {LLAMA} on L4")
    assert ask(f"{serve} {out.partition('--max-model-len ')[2].split()[0]}").out.startswith("fits: ")
    answer = ask(f"{serve} 8K --swap-space 8", code=1)
    assert answer.out.startswith("does not start: ")
    assert "`plimsoll flags` says what takes its place" in answer.text
    assert "note: planned without: --swap-space" in answer.out
    out = ask(f"plan --gpu L4 --vllm 0.32.0 vllm serve {LLAMA} --swap-space 8", code=1).out
    assert max(map(len, out.splitlines())) <= WIDTH
    first = " ".join(out.partition("\n\n")[0].split())
    assert first.startswith("does not fit: ")
    assert first.endswith("one request of full length does not fit; vLLM refuses --swap-space")


@each(
    ("words", "code"),
    [
        ("--kv-cache-memory-bytes 70G", "startup.kv-allocation"),
        ("--num-gpu-blocks-override 1000000", "startup.kv-allocation"),
        ("--max-model-len 1m", "other.bad-config"),
        ("--quantization awq", "other.bad-config"),
    ],
)
def test_what_cannot_be_is_not_called_fitting(words: str, code: str) -> None:
    """A cache larger than the card, a context beyond the model's and packing that no file tells of are refused by code."""
    assert code in {finding["code"] for finding in planned(f"{LLAMA} {words}", code=1)["findings"]}


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


def _file(folder: Path, *lines: str) -> str:
    (folder / "commands.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"--compare {folder / 'commands.txt'}"


def test_commands_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command a line; one that cannot be planned, or is mistyped, says why in its place, and the rest goes on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = f"vllm serve {LLAMA} --max-model-len 8k"
    file = _file(tmp_path, command, "vllm serve no/such-model", f"--gpuz L4 vllm serve {LLAMA}")
    out = ask(f"plan --gpu H100 {file}", code=1).out
    assert "not planned: no/such-model" in out
    assert "C  commands.txt:3: not planned: `--gpuz L4`" in out
    assert "--gpu-memory-gib" in out, "what may stand there"
    assert len(ask(f"plan --gpu H100 {file} --json", code=1).body["compare"]) == 3
    text = ask(f"plan --gpu H100 {tmp_path / 'commands.txt'}").text
    assert f"3 vLLM starts were found and this is the first, commands.txt:1; {file} plans them all" in text


def test_a_line_may_name_its_own_card(tmp_path: Path) -> None:
    """What stands in front of `vllm serve` is that line's; where all lines name their card, no other is needed."""
    command = f"vllm serve {LLAMA} --max-model-len 8K"
    file = _file(tmp_path, f"--gpu L4 --vllm 0.25.1 {command}", command)
    plans = [one["plan"] for one in ask(f"plan --gpu H100 --used-gib 2 --vllm 0.32.0 {file} --json").body["compare"]]
    assert [(plan["gpu"]["name"], plan["vllm"]) for plan in plans] == [("L4", "0.25.1"), ("H100 SXM 80GB", "0.32.0")]
    ask(f"plan {_file(tmp_path, f'--gpu L4 {command}')}")


def test_a_line_that_is_no_start_is_named(tmp_path: Path) -> None:
    """It is not dropped in silence; in a script, other commands are what belongs there."""
    lines = (f"vllm serve {LLAMA} --max-model-len 8K", "garbage", f"vllm serve {LLAMA} --max-model-len 4K")
    file = _file(tmp_path, *lines)
    assert "note: commands.txt:2: `garbage` begins no vLLM start" in ask(f"plan --gpu H100 {file}").out
    assert len(ask(f"plan --gpu H100 {file} --json").body["notes"]) == 1
    assert "garbage" not in ask(f"plan --gpu H100 {_file(tmp_path, '#!/bin/sh', *lines)}").out


def test_a_refused_flag_is_shown_and_called_what_a_plan_alone_calls_it(tmp_path: Path) -> None:
    """The flag that only one start has stands under its letter as it was written, and memory is not blamed for it."""
    command = f"vllm serve {LLAMA} --max-model-len 8K"
    file = _file(tmp_path, command, f"{command} --swap-space 4")
    lines = ask(f"plan --gpu H100 --vllm 0.32.0 {file}", code=1).out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split() == ["A", "B"])
    assert lines[head + 1].strip() == "--swap-space 4"
    assert lines[head + 2].split() == ["*", "verdict", "fits", "does", "not", "start"]


# --certify

CERTIFY = "plan --certify --gpu H200 --vllm 0.25.1"
SECOND = f"-- vllm serve {LLAMA} --max-model-len 8192"
FIRST = f"-- env VLLM_USE_V2_MODEL_RUNNER=0 vllm serve {LLAMA} --max-model-len 8192"


@each(
    ("words", "code", "first", "also"),
    [
        (SECOND, 0, "Certified: no admitted request can exceed the card\n", "v1/worker/gpu/sample/prompt_logprob.py"),
        (SECOND, 0, "Certified: ", "no new one comes"),
        (FIRST, 1, "Not certified: 1 kind of request can exceed the card\n", "tokens with prompt_logprobs"),
        (FIRST, 1, "Not certified: ", "closed by: --max-num-batched-tokens"),
        (FIRST, 1, "Not certified: ", "all of them closed by: --gpu-memory-utilization 0.8"),
        (f"{SECOND} --logits-processors my.Processor", 1, "Not certified: --logits-processors: processors of your own", ""),
        (f"{SECOND} --swap-space 4", 1, "Not certified: vLLM would not start with it", ""),
    ],
)
def test_a_command_is_certified_or_what_breaks_it_is_named(words: str, code: int, first: str, also: str) -> None:
    """One sentence and exit 0; the smallest request with the flag that closes it, an unknown term or a refusal and exit 1."""
    out = ask(f"{CERTIFY} {words}", code=code).out
    assert out.startswith(first)
    assert also in out


def test_the_certificates_contract() -> None:
    """Terms, spare, kinds and assumptions in one object; the terms add up to the spare memory."""
    body = ask(f"{CERTIFY} --json {FIRST}", code=1).body
    assert (body["schema"], body["certified"]) == ("plimsoll.certify/1", False)
    assert sum(term["bytes"] for term in body["terms"]) == body["spare_bytes"]
    assert all(term["source"] for term in body["terms"])
    (asked,) = [kind for kind in body["kinds"] if kind["smallest"] is not None]
    assert asked["kind"] == "prompt_logprobs"
    assert asked["request"] == f"a prompt of {asked['smallest']:,} tokens with prompt_logprobs"
    assert body["closes_all"].startswith("--gpu-memory-utilization")
    assert body["assumptions"]


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
