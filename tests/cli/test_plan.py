"""`plimsoll plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.render.terminal import WIDTH
from tests.models.hub_server import running

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_a_bundled_model_on_a_known_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Offline, by name, in words: the verdict, the bar, the terms, the blocks."""
    assert main(["plan", "--gpu", "H100", "--vllm", "0.32.0", "vllm", "serve", LLAMA, "--max-model-len", "32k"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fits: {LLAMA} on H100")
    assert "KV cache" in out
    assert "blocks of 16 tokens" in out


def test_the_json_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """One object with the promised keys; the terms add up to what was requested."""
    assert main(["plan", "--gpu", "L4", "--vllm", "0.32.0", "--json", "--", "vllm", "serve", LLAMA, "--swap-space", "4"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.plan/1"
    assert body["fits"] is False
    ledger = {name: term["value"] for name, term in body["ledger"].items()}
    assert sum(ledger[n] for n in ("weights", "non_torch", "activation", "graphs", "kv")) == ledger["requested"]
    assert {"block_size", "bytes_per_block", "num_blocks", "tokens", "max_concurrency", "groups"} <= set(body["kv"])
    codes = {finding["code"] for finding in body["findings"]}
    assert {"startup.bad-flag", "startup.context-too-long"} <= codes
    assert body["flags"]["items"][0]["status"] == "removed"
    assert {"flag", "value", "why", "effect"} == set(body["advice"][0])
    assert body["gpu"]["count"] == 1


def test_whispers_concurrency_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the cross-attention of each request is not counted, no number of requests is printed, and none is worked out."""
    serve = ["--gpu", "L4", "--vllm", "0.32.0", "--", "vllm", "serve", "openai/whisper-large-v3"]
    assert main(["plan", "--json", *serve]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["max_concurrency"] is None
    assert main(["plan", *serve]) == 0
    assert "how many requests fit at once is not known" in " ".join(capsys.readouterr().out.split())
    for asked in (["--workload", "prompt=10,output=100"], ["--matrix", "context=448 concurrency=8"]):
        assert main(["plan", *asked, *serve]) == 2
        assert "encoder-decoder" in capsys.readouterr().err


def test_a_local_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a config.json is enough, and its name may be given in a script."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
        "max_position_embeddings": 4096, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    script = tmp_path / "start.sh"
    script.write_text(f"MODEL={tmp_path}\nvllm serve $MODEL --gpu-memory-utilization 0.5\n", encoding="utf-8")
    assert main(["plan", "--gpu-memory-gib", "8", "--json", str(script)]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["gpu"]["total_bytes"] == 8 * 2**30
    assert body["ledger"]["requested"]["value"] == 4 * 2**30


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "vllm", "serve", LLAMA], 2, "which card?"),
        (["plan", "vllm", "serve", LLAMA], 2, "pip install nvidia-ml-py"),
        (
            ["plan", "--gpu", "H100", "Qwen/Qwen3-8B"],
            2,
            "no such file; a model goes behind `vllm serve`: vllm serve Qwen/Qwen3-8B",
        ),
        (["plan", "--gpu", "H1000", "vllm", "serve", LLAMA], 2, "H1000"),
        (["plan", "--gpu", "a100", "vllm", "serve", LLAMA], 2, "a100"),
        (["plan", "--gpu", "H100", "--", "vllm", "serve"], 2, "model"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "-tp", "3"], 2, ""),
        (["plan", "--gpu", "H100", "--used-gib", "x", "vllm", "serve", LLAMA], 2, "x"),
        (["plan", "--gpu", "H100", "--gpus", "1", "vllm", "serve", LLAMA, "-tp", "2"], 2, "needs 2 GPUs"),
        (["plan", "--gpu-memory-gib", "0", "vllm", "serve", LLAMA], 2, "memory"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "--max-model-len", "0"], 2, "--max-model-len"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "--cpu-offload-gb", "nan"], 2, "--cpu-offload-gb"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "-tp", "0"], 2, "at least 1"),
        (
            ["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            2,
            "at least",
        ),
        (["plan", "--gpu", "H100", "--vllm", "0.6.0", "vllm", "serve", "deepseek-ai/DeepSeek-V2-Lite"], 2, "0.7.1"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "--gpu-memory-utilization", "1.5"], 2, "1.5"),
        (["plan", "--gpu", "H100", "vllm", "serve", "no-such-org/no-such-model"], 3, "no-such-org/no-such-model"),
        (["plan", "--gpu", "H100", "--max-model-len", "8k", "vllm", "serve", LLAMA], 2, "go behind `vllm serve MODEL`"),
        (["plan", "--gpu", "H100", "--jsn", "vllm", "serve", LLAMA], 2, "--jsn is no option of plimsoll plan"),
        (["plan", "--gpu", "L4", "--used-gib", "4096", "vllm", "serve", LLAMA], 2, "L4 has 22.0 GiB in all"),
        (["plan", "--gpu-memory-gib", "23034", "vllm", "serve", LLAMA], 2, "nvidia-smi's are MiB"),
        (["plan", "--gpu", "H100", "vllm", "serve", LLAMA, "--max-num-seqs", "0"], 2, "--max-num-seqs must be at least 1"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown card, no model, heads that do not divide, a model nobody has: one line and the right exit code."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_an_upgrade_shows_what_it_does_to_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """--from plans the command in both releases: 0.20.0 raised the share and began to set graph memory aside."""
    words = ["plan", "--gpu", "H100", "--from", "0.19.0", "--vllm", "0.25.1", "vllm", "serve", LLAMA]
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["from"]["vllm"] == "0.19.0"
    assert body["from"]["tokens"] != body["kv"]["tokens"]
    assert main(words) == 0
    assert "From 0.19.0 to 0.25.1: KV" in capsys.readouterr().out


def test_a_workload_a_matrix_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run answers for a workload, draws the matrix and writes the page; the JSON carries both."""
    page = tmp_path / "plan.html"
    words = ["plan", "--gpu", "L40S", "--vllm", "0.25.1", "--workload", "prompt=1200,output=300,concurrency=64",
             "--matrix", "context=8k,32k", "concurrency=8..64", "vllm", "serve", LLAMA, "--max-model-len", "32k"]  # fmt: skip
    assert main([*words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "Paging saves" in out
    assert "at most" in out
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["workload"]["verdict"] == "fits"
    assert len(body["matrix"]["cells"]) > 0


def test_a_trace_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths of recorded requests are judged as they were, at the concurrency asked for."""
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,374,44\n2,396,109\n3,1500,20\n", encoding="utf-8")
    words = ["plan", "--gpu", "H100", "--json", "--workload", f"{trace}:concurrency=100", "--", "vllm", "serve", LLAMA]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["verdict"] == "fits"


def test_a_draft_model_is_counted_or_said_to_be_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter we know is in the weights; one we cannot find is a note."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for drafter, known in (("meta-llama/Llama-3.2-1B-Instruct", True), ("no/such-drafter", False)):
        main(["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, "--speculative-config.model", drafter,
              "--speculative-config.num_speculative_tokens", "3"])  # fmt: skip
        body = json.loads(capsys.readouterr().out)
        assert (body["ledger"]["weights"]["value"] > 17 * 2**30) is known
        assert any("not in these figures" in note for note in body["notes"]) is not known


def test_a_workload_that_does_not_fit_is_bad_news(capsys: pytest.CaptureFixture[str]) -> None:
    """The server fits, the workload does not: exit 1."""
    words = ["plan", "--gpu", "L4", "--workload", "prompt=8000,output=100,concurrency=500", "vllm", "serve", LLAMA]
    assert main([*words, "--max-model-len", "16k"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("fits, but not this workload: ")
    assert "does-not-fit" in out.replace("does not fit", "does-not-fit")


def test_a_trace_alone_is_not_judged_by_its_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`one at a time` is no answer about traffic, and the text says which command gives one."""
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,374,44\n2,396,109\n", encoding="utf-8")
    assert main(["plan", "--gpu", "H100", "--workload", str(trace), "vllm", "serve", LLAMA]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "When they came is not looked at here: `plimsoll simulate` replays that." in said


def test_commands_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--compare plans one command a line; a line that cannot be planned says why and the rest goes on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "commands.txt"
    file.write_text(f"vllm serve {LLAMA} --max-model-len 8k\nvllm serve no/such-model\n", encoding="utf-8")
    assert main(["plan", "--gpu", "H100", "--compare", str(file)]) == 1
    out = capsys.readouterr().out
    assert "not planned: no/such-model" in out
    assert main(["plan", "--gpu", "H100", "--compare", str(file), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["compare"]) == 2


def test_a_plan_that_hangs_on_the_estimate_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the low end of the band would not start, the first line says it, and a context that starts there too is named."""
    words = ["plan", "--gpu", "L4", "--vllm", "0.32.0", "vllm", "serve", LLAMA, "--max-model-len"]
    assert main([*words, "26000", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["kv"]["fits_at_low_end"] is False
    assert main([*words, "26000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fits by the estimate, not at its low end: {LLAMA} on L4")
    shorter = out.partition("--max-model-len ")[2].split()[0]
    assert main([*words, shorter]) == 0
    assert capsys.readouterr().out.startswith("fits: ")


def test_the_first_line_tells_memory_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that vLLM refuses is not a lack of memory; where both stop the start, both are in the first line."""
    words = ["plan", "--gpu", "L4", "--vllm", "0.32.0", "vllm", "serve", LLAMA, "--swap-space", "8"]
    assert main([*words, "--max-model-len", "8K"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("does not start: ")
    assert "`plimsoll flags` says what takes its place" in " ".join(out.split())
    assert "note: planned without: --swap-space" in out
    assert main(words) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    first = " ".join(out.partition("\n\n")[0].split())
    assert first.startswith("does not fit: ")
    assert first.endswith("one request of full length does not fit; vLLM refuses --swap-space")


def test_a_file_with_several_starts_says_which_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is planned, and a note names it and the way to see all."""
    file = tmp_path / "both.sh"
    file.write_text(f"vllm serve {LLAMA} --max-model-len 8K\nvllm serve no/such-model\n", encoding="utf-8")
    assert main(["plan", "--gpu", "H100", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"2 vLLM starts were found and this is the first, both.sh:1; --compare {file} plans them all" in said


def test_a_page_that_cannot_be_written_is_the_worlds_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 3."""
    assert main(["plan", "--gpu", "H100", "--html", "/no/such/folder/p.html", "vllm", "serve", LLAMA]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_the_matrix_is_of_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """What the matrix says of the command's own context is what the plan says of it, a draft model's cache included."""
    main(["plan", "--gpu", "H100", "--json", "--matrix", "context=32k", "concurrency=8", "vllm", "serve", LLAMA,
          "--max-model-len", "32k", "--speculative-config.model", "meta-llama/Llama-3.2-1B-Instruct",
          "--speculative-config.num_speculative_tokens", "3"])  # fmt: skip
    body = json.loads(capsys.readouterr().out)
    each = sum(group["blocks_per_request"] for group in body["kv"]["groups"])
    assert body["matrix"]["at_once"] == [(body["kv"]["num_blocks"] - 1) // each]


@pytest.mark.parametrize("option", [["--workload", "prompt=x"], ["--matrix", "context=0"], ["--workload", ""]])
def test_nonsense_in_our_own_options_is_one_line(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A workload or matrix that says nothing is the user's to mend."""
    assert main(["plan", "--gpu", "H100", *option, "vllm", "serve", LLAMA]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_real_start_narrows_the_next_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--learn on the log of a real H200 start shows the terms, the next plan is narrower, --forget brings the old one back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200" / "base.log"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = [
        "plan", "--gpu", "H200", "--vllm", "0.25.1", "--json", "--", "vllm", "serve", str(tmp_path), "--max-model-len",
        "8192",
    ]  # fmt: skip

    def band() -> int:
        assert main(words) == 0
        kv = json.loads(capsys.readouterr().out)["ledger"]["kv"]
        assert kv["low"] <= 112.28 * 2**30 <= kv["high"]
        return int(kv["high"] - kv["low"])

    before = band()
    assert main([*words[:1], "--learn", str(log), *words[1:]]) == 0
    assert {row["term"] for row in json.loads(capsys.readouterr().out)["learned"]} >= {"weights", "kv"}
    assert band() < before / 2
    assert main(["plan", "--forget"]) == 0
    assert capsys.readouterr().out == "forgot 1 correction\n"
    assert band() == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--kv-cache-memory-bytes", "70G"], "startup.kv-allocation"),
        (["--num-gpu-blocks-override", "1000000"], "startup.kv-allocation"),
        (["--max-model-len", "1m"], "other.bad-config"),
    ],
)
def test_what_cannot_be_is_not_called_fitting(words: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache larger than the card and a context beyond the model's are refused by code."""
    assert main(["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, *words]) == 1
    assert code in {finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_plain_weights_are_not_called_quantised(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM finds no file that says how they were packed; a file named in --hf-overrides may say it."""
    words = ["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, "--quantization", "awq"]
    assert main(words) == 1
    assert "other.bad-config" in {finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert main([*words, "--hf-overrides", '{"quantization_config_file": "quant.json"}']) == 0


def test_overrides_of_the_model_count(capsys: pytest.CaptureFixture[str]) -> None:
    """--hf-overrides changes the shape that is planned."""
    sizes = []
    for extra in ([], ["--hf-overrides", '{"num_hidden_layers": 1}']):
        assert main(["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, *extra]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["kv"]["bytes_per_block"])
    assert sizes[0] == 32 * sizes[1]


def test_every_offer_makes_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    """With neighbours on a small card no change alone is enough: an offer names all that belongs to it, and is as good as
    its word."""
    words = ["plan", "--gpu", "L40S", "--used-gib", "15", "--json", "--", "vllm", "serve", LLAMA]
    assert main(words) == 1
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert len(advice) > 1
    for offer in advice:
        assert offer["flag"] == "--gpu-memory-utilization"
        followed = [word for one in (offer, *offer["also"]) for word in (one["flag"], one["value"])]
        assert main([*words, *followed]) == 0


def test_a_page_is_written_to_what_is_there(tmp_path: Path) -> None:
    """A link is followed and a device is not replaced; nothing is left behind when the target is a folder."""
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    for target, code in ((link, 0), (Path("/dev/null"), 0), (tmp_path, 3)):
        assert main(["plan", "--gpu", "H100", "--html", str(target), "vllm", "serve", LLAMA]) == code
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not Path("/dev/null").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"real.html", "link.html"}


def test_a_config_that_is_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken config.json is the user's to mend."""
    (tmp_path / "config.json").write_text("{not json", encoding="utf-8")
    assert main(["plan", "--gpu", "L4", "vllm", "serve", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_flags_in_a_config_file_are_planned(form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `vllm serve --config FILE` would read is part of the plan, and the command line wins over it."""
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-len: 4096\nmax-num-seqs: 7\n", encoding="utf-8")
    words = [word.format(path) for word in form]
    main(["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, *words, "--max-num-seqs", "9"])
    from_file = json.loads(capsys.readouterr().out)
    main(["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA, "--max-model-len", "4096", "--max-num-seqs", "9"])
    from_flags = json.loads(capsys.readouterr().out)
    assert from_file["kv"] == from_flags["kv"]
    assert from_file["ledger"] == from_flags["ledger"]


def test_the_revision_of_the_command_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve --revision` names another shape of a bundled model: the hub is asked for that one."""
    for name, value in {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        main(["plan", "--gpu", "H100", "--vllm", "0.32.0", "vllm", "serve", LLAMA, "--revision", "refs/pr/7"])
        assert hub.seen[0][0] == f"/{LLAMA}/resolve/refs%2Fpr%2F7/config.json"
