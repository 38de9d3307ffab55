"""`plimsoll simulate` as a user meets it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.main import main
from plimsoll.cli.simulate import COMPILING
from tests.cli.complaints import complaint

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SHARED = Path(__file__).resolve().parents[3] / "shared"
needs_golden = pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="the recorded runs are not beside the repository")
BUSY = "synthetic:requests=300,rate=50,prompt=600,output=100,families=4,family_tokens=256,priorities=3,seed=7"
STEPS = (
    "step,t_start_ns,t_end_ns,running,waiting,sched_reqs,sched_tokens,new,resumed,preempted,ctx_tokens,used_blocks,"
    "table_blocks,waste_slots,hit_tokens_cum,query_tokens_cum"
)
REQUESTS = "req,arrival_ns,first_sched_ns,first_token_ns,finish_ns,prompt,output,preemptions,cached_tokens"
R_WORDS = (
    "--limit 300 --trace-block-size 16 --num-blocks 2588 --max-model-len 32768 --async-scheduling "
    "--base-ns 17000000 --token-ns 100000 --seq-ns 20000 --ctx-ps 140000"
)
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run with --json, expect success, return the object."""

    def run(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        cut = words.index("--") if "--" in words else len(words)
        code = main(["simulate", *words[:cut], "--json", *words[cut:]])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return dict(json.loads(captured.out))

    return run


def rows(path: Path) -> list[dict[str, int]]:
    """A CSV of whole numbers."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]


def azure(path: Path, *requests: tuple[float, int, int]) -> str:
    """A file of (second, prompt, output)."""
    lines = [f"2024-01-01 00:00:{second:09.6f},{prompt},{output}" for second, prompt, output in requests]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n", encoding="utf-8")
    return str(path)


def test_the_json_contract(ask: Ask) -> None:
    """One object with every promised key; what must add up does."""
    body = ask(BUSY, "--num-blocks", "600")
    assert body["schema"] == "plimsoll.simulate/1"
    for name in "requests finished rejected steps preemptions preempted_requests peak_blocks recomputed_tokens".split():
        assert isinstance(body[name], int), name
    for name in ("sim_seconds", "wall_seconds"):
        assert body[name] > 0, name
    assert {"mean", "p50", "p99"} <= set(body["kv_usage"])
    assert {"mean_slots", "mean_percent"} <= set(body["waste"])
    promised = {"query_tokens", "hit_tokens", "resumed_query_tokens", "resumed_hit_tokens", "hit_rate"}
    assert promised <= set(body["prefix"])
    for name in ("ttft", "tpot", "e2e", "queue"):
        assert set(body[name]) == {"mean", "p50", "p90", "p99"}, name
        assert 0 <= body[name]["p50"] <= body[name]["p90"] <= body[name]["p99"]
    assert body["requests"] == 300 == body["finished"] + body["rejected"]
    assert body["preemptions"] >= body["preempted_requests"] > 0
    assert body["peak_blocks"] <= 599
    assert 0 < body["kv_usage"]["mean"] <= body["kv_usage"]["p99"] <= 1
    assert body["prefix"]["hit_rate"] == pytest.approx(body["prefix"]["hit_tokens"] / body["prefix"]["query_tokens"])


def test_the_screen_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What was replayed, what it means, what happened and how long it took; nothing but text, within a terminal's width."""
    assert main(["simulate", BUSY, "--num-blocks", "600"]) == 0
    captured = capsys.readouterr()
    assert captured.err in ("", COMPILING + "\n")
    assert captured.out.startswith("replayed: synthetic: 300 requests")
    for said in ("preemptions", "cache use", "waste", "prefix hits", "TTFT", "TPOT", "E2E", "throughput", "599 blocks"):
        assert said in captured.out
    assert "\x1b" not in captured.out
    assert max(map(len, captured.out.splitlines())) <= 120


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """--help needs no trace, and leaves no option of the contract out."""
    assert main(["simulate", "--help"]) == 0
    out = capsys.readouterr().out
    for name in (
        "--num-blocks --plan --steps --requests --html --fit --json --limit --block-size --max-num-seqs --speedup "
        "--max-num-batched-tokens --max-model-len --no-prefix-caching --no-chunked-prefill --long-prefill-token-threshold "
        "--async-scheduling --watermark --no-reserve-full-isl --trace-block-size --base-ns --token-ns --seq-ns --ctx-ps"
    ).split():
        assert name in out, name


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_rows_are_written(ending: str, tmp_path: Path, ask: Ask) -> None:
    """--steps and --requests have the promised columns and agree with the summary, also when compressed."""
    steps, requests = tmp_path / f"s.csv{ending}", tmp_path / f"r.csv{ending}"
    body = ask(BUSY, "--num-blocks", "600", "--max-model-len", "1000", "--steps", str(steps), "--requests", str(requests))
    for path, head in ((steps, STEPS), (requests, REQUESTS)):
        text = gzip.decompress(path.read_bytes()) if ending else path.read_bytes()
        assert text.startswith(head.encode() + b"\n")
        assert text.endswith(b"\n")
    by_step, by_request = rows(steps), rows(requests)
    assert len(by_step) == body["steps"]
    assert sum(row["preempted"] for row in by_step) == body["preemptions"]
    assert max(row["used_blocks"] for row in by_step) == body["peak_blocks"]
    assert len(by_request) == body["requests"] - body["rejected"] < body["requests"]
    assert sum(row["preemptions"] for row in by_request) == body["preemptions"]


@needs_golden
@pytest.mark.parametrize(
    ("name", "trace", "words"),
    [
        ("B_async", "AzureLLMInferenceTrace_conv.csv.gz", "--limit 2000 --num-blocks 1025 --async-scheduling"),
        ("R", "sharegpt_300_hashed.jsonl.gz", R_WORDS),
    ],
    ids=["B_async", "R"],
)
def test_the_files_are_those_of_the_engine(name: str, trace: str, words: str, tmp_path: Path) -> None:
    """What the command writes is what vLLM's own scheduler wrote, by the reference's own comparison."""
    pairs = {"steps": tmp_path / "steps.csv", "req": tmp_path / "requests.csv.gz"}
    written = ["--steps", str(pairs["steps"]), "--requests", str(pairs["req"])]
    assert main(["simulate", str(SHARED / "data" / "traces" / trace), *words.split(), *written, "--json"]) == 0
    for kind, mine in pairs.items():
        compare = [sys.executable, "compare_steps.py", f"golden/{name}_{kind}.csv.gz", str(mine)]
        done = subprocess.run(compare, cwd=SHARED / "oracle", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--html writes one file that loads nothing from anywhere; the answer is still printed."""
    page = tmp_path / "run.html"
    assert main(["simulate", BUSY, "--num-blocks", "600", "--html", str(page)]) == 0
    assert "replayed" in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    for fetched in ("src=", "<link", "@import", "url(", "fetch("):
        assert fetched not in html
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]


def test_a_part_of_a_trace(tmp_path: Path, ask: Ask) -> None:
    """--limit takes the first, --from-s and --until-s a window, --speedup hurries the arrivals."""
    trace = azure(tmp_path / "t.csv", *((second, 100, 5) for second in range(10)))
    written = tmp_path / "r.csv"
    assert ask(trace, "--limit", "3")["requests"] == 3
    assert ask(trace, "--limit", "1000")["requests"] == 10
    assert ask(trace, "--from-s", "2", "--until-s", "6")["requests"] == 4
    assert ask(trace, "--from-s", "9")["requests"] == 1
    assert ask(trace, "--until-s", "2.5")["requests"] == 3
    assert ask(trace, "--speedup", "4", "--requests", str(written))["requests"] == 10
    assert [row["arrival_ns"] for row in rows(written)] == [250_000_000 * number for number in range(10)]


def test_several_traces_are_merged(tmp_path: Path, ask: Ask) -> None:
    """Two services on one engine: their requests together, in order of arrival."""
    one, other = azure(tmp_path / "a.csv", (0, 50, 2), (2, 51, 2)), azure(tmp_path / "b.csv", (5, 60, 2), (6, 61, 2))
    written = tmp_path / "r.csv"
    body = ask(one, other, "synthetic:requests=5", "--requests", str(written), "--limit", "2")
    assert body["requests"] == 6
    assert "a.csv" in body["trace"]
    assert "b.csv" in body["trace"]
    arrivals = [row["arrival_ns"] for row in rows(written)]
    assert arrivals == sorted(arrivals)


def test_standard_input_and_bad_rows(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-` reads a pipe; a row that cannot be read is named with its line, and left out with --skip-bad."""
    text = Path(azure(tmp_path / "t.csv", (0, 100, 5), (1, 100, 5))).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert ask("-")["requests"] == 2
    trace = Path(azure(tmp_path / "t.csv", (0, 100, 5), (1, 100, 5)))
    trace.write_text(trace.read_text() + "2024-01-01 00:00:03,many,5\n", encoding="utf-8")
    assert main(["simulate", str(trace)]) == 2
    assert "line 4" in complaint(capsys)
    body = ask(str(trace), "--skip-bad")
    assert body["requests"] == 2
    assert any("1 row" in note and "left out" in note for note in [*body["notes"], *body["reading"]])


def test_lengths_alone_need_arrivals(tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    """Without arrivals the message says what to give; --rate, --arrivals, --burstiness and --seed make them."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,completion_tokens\n" + "100,10\n" * 50, encoding="utf-8")
    assert main(["simulate", str(trace)]) == 2
    assert "--rate" in complaint(capsys)
    written = tmp_path / "r.csv"

    def arrivals(*words: str) -> list[int]:
        ask(str(trace), "--requests", str(written), *words)
        return [row["arrival_ns"] for row in rows(written)]

    assert arrivals("--rate", "10", "--arrivals", "constant") == [100_000_000 * number for number in range(50)]
    assert set(arrivals("--arrivals", "at-once")) == {0}
    poisson = arrivals("--rate", "10")
    assert 2e9 < poisson[-1] < 10e9
    assert arrivals("--rate", "10", "--seed", "0") == poisson != arrivals("--rate", "10", "--seed", "1")
    bursty = ("--rate", "10", "--arrivals", "bursty", "--burstiness")
    assert arrivals(*bursty, "0.1") != arrivals(*bursty, "0.5")


def test_the_size_of_the_traces_blocks(tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    """A hash id stands for 512 tokens unless --trace-block-size says otherwise; too few ids for a prompt are refused."""
    trace = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 4, "hash_ids": [1, 2, 3, %d]}\n'
    trace.write_text(row % (0, 4) + row % (5000, 5), encoding="utf-8")
    assert ask(str(trace), "--trace-block-size", "16")["prefix"]["hit_tokens"] == 48
    assert ask(str(trace))["prefix"]["hit_tokens"] == 48  # both prompts lie in id 1, but for the token that must be computed
    assert main(["simulate", str(trace), "--trace-block-size", "8"]) == 2
    assert "--trace-block-size" in complaint(capsys)


def test_limits_of_the_engine_hold(tmp_path: Path, ask: Ask) -> None:
    """Each option bounds or changes what it is named after."""
    steps = tmp_path / "s.csv"
    plain = ask(BUSY)
    assert plain["preemptions"] == plain["rejected"] == 0
    tight = ask(BUSY, "--num-blocks", "500")
    assert tight["preemptions"] > 0
    assert tight["peak_blocks"] <= 499
    assert ask(BUSY, "--block-size", "64")["waste"]["mean_slots"] > 2 * plain["waste"]["mean_slots"]
    assert ask(BUSY, "--max-num-seqs", "4")["peak_running"] == 4
    ask(BUSY, "--max-num-batched-tokens", "256", "--steps", str(steps))
    assert max(row["sched_tokens"] for row in rows(steps)) == 256
    assert 0 < ask(BUSY, "--max-model-len", "700")["rejected"] < 300
    assert plain["prefix"]["hit_tokens"] > 0
    assert ask(BUSY, "--no-prefix-caching")["prefix"]["hit_tokens"] == 0
    assert ask(BUSY, "--num-blocks", "500", "--watermark", "0.2")["preemptions"] < tight["preemptions"]
    assert ask(BUSY, "--num-blocks", "500", "--no-reserve-full-isl")["preemptions"] > tight["preemptions"]
    ahead = ask(BUSY, "--async-scheduling")
    assert ahead["settings"]["async_scheduling"] is True
    assert ahead["steps"] != plain["steps"]
    assert ask(BUSY, "--no-async-scheduling")["steps"] == plain["steps"]


def test_prompts_in_one_piece(tmp_path: Path, ask: Ask) -> None:
    """--no-chunked-prefill computes every prompt in the step that begins it; a threshold cuts long ones, if there are two."""
    steps, requests = tmp_path / "s.csv", tmp_path / "r.csv"
    words = ["--max-num-batched-tokens", "4096", "--max-model-len", "4096", "--steps", str(steps), "--requests", str(requests)]

    def in_one_step() -> bool:
        ends = {row["t_start_ns"]: row["t_end_ns"] for row in rows(steps)}
        return all(row["first_token_ns"] == ends[row["first_sched_ns"]] for row in rows(requests))

    ask(BUSY, "--speedup", "20", *words)
    assert not in_one_step()
    ask(BUSY, "--speedup", "20", *words, "--no-chunked-prefill")
    assert in_one_step()
    trace = azure(tmp_path / "t.csv", (0, 1000, 5), (0, 1000, 5))
    assert ask(trace)["steps"] == 5
    assert ask(trace, "--long-prefill-token-threshold", "128")["steps"] == 8 + 4


def test_the_order_of_service(tmp_path: Path, ask: Ask) -> None:
    """With one place, fcfs serves by arrival and priority by importance."""
    trace, written = tmp_path / "t.jsonl", tmp_path / "r.csv"
    row = '{"schema":"plimsoll.request/1","arrival":%s,"prompt_tokens":40,"output_tokens":9,"priority":%d}\n'
    trace.write_text(row % ("1.0", 0) + row % ("1.001", 5) + row % ("1.002", 1), encoding="utf-8")
    for policy, order in (("fcfs", [0, 1, 2]), ("priority", [0, 2, 1])):
        ask(str(trace), "--max-num-seqs", "1", "--scheduling-policy", policy, "--requests", str(written))
        assert [row["req"] for row in sorted(rows(written), key=lambda row: row["first_sched_ns"])] == order


def test_the_length_of_a_step(tmp_path: Path, ask: Ask) -> None:
    """The four constants add up as the reference says: a prompt of 10 and 3 tokens are three steps."""
    trace = azure(tmp_path / "t.csv", (0, 10, 3))
    for said, expected in (((1000, 0, 0, 0), 3000), ((0, 5, 0, 0), 60), ((0, 0, 7, 0), 21), ((0, 0, 0, 1000), 33)):
        names = ("--base-ns", "--token-ns", "--seq-ns", "--ctx-ps")
        body = ask(trace, *(word for name, value in zip(names, said, strict=True) for word in (name, str(value))))
        assert body["sim_seconds"] == pytest.approx(expected / 1e9)
        assert body["e2e"]["mean"] == pytest.approx(expected / 1e9)


def test_layers_of_several_kinds(ask: Ask) -> None:
    """--groups: a sliding window gives blocks back, a state keeps few, and both take theirs from the one pool."""
    full = ask(BUSY, "--groups", "full:16")
    assert full["peak_blocks"] == ask(BUSY)["peak_blocks"]
    assert ask(BUSY, "--groups", "sliding:16:64")["peak_blocks"] < full["peak_blocks"]
    both = ask(BUSY, "--groups", "full:16,sliding:16:64")
    assert both["peak_blocks"] > full["peak_blocks"]
    assert [group["kind"] for group in both["settings"]["groups"]] == ["full", "sliding"]
    assert ask(BUSY, "--groups", "full:32,mamba:32")["settings"]["block_size"] == 32


@pytest.mark.parametrize(
    ("model", "flags", "kinds"),
    [
        (LLAMA, ["--max-model-len", "8k"], set()),
        ("openai/gpt-oss-20b", ["--no-enable-prefix-caching"], {"full", "sliding"}),
        ("google/gemma-3-12b-it", ["--max-num-seqs", "64"], {"full", "sliding"}),
        ("nvidia/Nemotron-H-56B-Base-8K", ["-tp", "2", "--max-num-seqs", "128"], {"full", "mamba"}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", ["-tp", "4", "--max-num-batched-tokens", "4096"], {"full", "mamba"}),
    ],
)
def test_a_plan_is_replayed(
    model: str, flags: list[str], kinds: set[str], tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's blocks, groups and limits, from its file or made from the command; both give the same run."""
    command = ["vllm", "serve", model, *flags]
    assert main(["plan", "--gpu", "H100", "--json", "--", *command]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    plan = json.loads(file.read_text())
    from_file, made = ask(BUSY, "--plan", str(file)), ask(BUSY, "--gpu", "H100", "--", *command)
    assert {group["kind"] for group in made["settings"]["groups"]} == kinds
    for name in ("num_blocks", "block_size", "max_model_len"):
        assert made["settings"][name] == plan["kv"][name]
    for name in ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"):
        assert made["settings"][name] == plan["settings"][name]
    assert made["settings"]["prefix_caching"] is ("--no-enable-prefix-caching" not in flags)
    assert made["finished"] + made["rejected"] == 300
    assert {**from_file, "wall_seconds": 0} == {**made, "wall_seconds": 0}
    assert (
        ask(BUSY, "--plan", str(file), "--num-blocks", "8000", "--max-num-seqs", "3", "--max-model-len", "8k")["peak_running"]
        <= 3
    )


def test_what_runs_is_success(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    """Exit 0 whatever was rejected or preempted, in words and in JSON."""
    body = ask(BUSY, "--num-blocks", "2")
    assert body["rejected"] == body["requests"] == 300
    assert body["steps"] == body["finished"] == 0
    assert main(["simulate", BUSY, "--num-blocks", "2"]) == 0
    assert "Every request was rejected" in capsys.readouterr().out


def test_what_the_scheduler_is_told_after_the_dashes_is_replayed(ask: Ask) -> None:
    """Policy, threshold, chunking and watermark of the command, and a note for what cannot be replayed."""
    flags = "--scheduling-policy priority --long-prefill-token-threshold 512 --watermark 0.1 --no-scheduler-reserve-full-isl"
    made = ask(BUSY, "--gpu", "H100", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "8k", *flags.split())
    told = made["settings"]
    assert (told["policy"], told["long_prefill_token_threshold"], told["watermark"]) == ("priority", 512, 0.1)
    assert told["reserve_full_isl"] is False
    whole = "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs 64 --max-model-len 8192 -pp 2"
    made = ask(BUSY, "--gpu", "H100", "--vllm", "0.31.0", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B", *whole.split())
    assert made["settings"]["chunked_prefill"] is False
    assert any("pipeline" in note for note in made["notes"])
    assert any("0.31.0" in note for note in made["notes"])


def test_what_is_not_replayed_is_noted(ask: Ask) -> None:
    """A server that would not start, by the plan's verdict; a flag that moves the scheduler and is not known here."""
    made = ask(BUSY, "--gpu", "L4", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "131072")
    assert any("does not start" in note and "startup." in note for note in made["notes"])
    command = ["vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "8k", "--max-num-active-seqs", "2"]
    assert any("--max-num-active-seqs" in note for note in ask(BUSY, "--gpu", "H100", "--", *command)["notes"])
