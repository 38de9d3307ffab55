"""`plimsoll simulate` as a user meets it: what it replays, what it writes, and what a user or the world does wrong."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.simulate import COMPILING
from tests.cli.answers import CAPTURES, LLAMA, ask
from tests.each import cases, each

SHARED = Path(__file__).resolve().parents[3] / "shared"
needs_golden = pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="the recorded runs are not beside the repository")
SMALL = "synthetic:requests=20,rate=20,prompt=100,output=10"
BUSY = "synthetic:requests=300,rate=50,prompt=600,output=100,families=4,family_tokens=256,priorities=3,seed=7"
STEPS = (
    "step,t_start_ns,t_end_ns,running,waiting,sched_reqs,sched_tokens,new,resumed,preempted,ctx_tokens,used_blocks,"
    "table_blocks,waste_slots,hit_tokens_cum,query_tokens_cum"
)
REQUESTS = "req,arrival_ns,first_sched_ns,first_token_ns,finish_ns,prompt,output,preemptions,cached_tokens"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
R_WORDS = (
    "--limit 300 --trace-block-size 16 --num-blocks 2588 --max-model-len 32768 --async-scheduling "
    "--base-ns 17000000 --token-ns 100000 --seq-ns 20000 --ctx-ps 140000"
)


def replay(words: str = "", *, trace: str = BUSY) -> dict[str, Any]:
    """The JSON of a replay that succeeds."""
    before, dashes, command = words.partition(" -- ")
    return ask(f"simulate {trace} {before} --json{dashes}{command}").body


def rows(path: Path) -> list[dict[str, int]]:
    """A CSV of whole numbers."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]


def azure(path: Path, *requests: tuple[float, int, int]) -> str:
    """A file of (second, prompt, output)."""
    lines = [f"2024-01-01 00:00:{second:09.6f},{prompt},{output}" for second, prompt, output in requests]
    path.write_text("\n".join([AZURE, *lines]) + "\n", encoding="utf-8")
    return str(path)


def test_the_screen_of_text() -> None:
    """What was replayed, what it means, what happened and how long it took, within a terminal's width; rejected is exit 0."""
    answer = ask(f"simulate {BUSY} --num-blocks 600")
    assert answer.err in ("", COMPILING + "\n")
    assert answer.out.startswith("replayed: synthetic: 300 requests")
    for said in ("preemptions", "cache use", "waste", "prefix hits", "TTFT", "TPOT", "E2E", "throughput", "599 blocks"):
        assert said in answer.out
    assert "\x1b" not in answer.out
    assert max(map(len, answer.out.splitlines())) <= 120
    body = replay("--num-blocks 2")
    assert (body["rejected"], body["steps"], body["finished"]) == (300, 0, 0)
    assert "Every request was rejected" in ask(f"simulate {BUSY} --num-blocks 2").out


@each("ending", ["", ".gz"])
def test_rows_are_written(ending: str, tmp_path: Path) -> None:
    """--steps and --requests have the promised columns and agree with the summary, also when compressed."""
    steps, requests = tmp_path / f"s.csv{ending}", tmp_path / f"r.csv{ending}"
    body = replay(f"--num-blocks 600 --max-model-len 1000 --steps {steps} --requests {requests}")
    for path, head in ((steps, STEPS), (requests, REQUESTS)):
        text = gzip.decompress(path.read_bytes()) if ending else path.read_bytes()
        assert (text.startswith(head.encode() + b"\n"), text.endswith(b"\n")) == (True, True)
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
    replay(f"{words} --steps {pairs['steps']} --requests {pairs['req']}", trace=str(SHARED / "data" / "traces" / trace))
    for kind, mine in pairs.items():
        compare = [sys.executable, "compare_steps.py", f"golden/{name}_{kind}.csv.gz", str(mine)]
        done = subprocess.run(compare, cwd=SHARED / "oracle", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_part_of_a_trace_and_several_of_them(tmp_path: Path) -> None:
    """--limit takes the first, --from-s and --until-s a window, --speedup hurries; two traces arrive together."""
    trace, written = azure(tmp_path / "t.csv", *((second, 100, 5) for second in range(10))), tmp_path / "r.csv"
    for words, count in (
        ("--limit 3", 3),
        ("--limit 1000", 10),
        ("--from-s 2 --until-s 6", 4),
        ("--from-s 9", 1),
        ("--until-s 2.5", 3),
        (f"--speedup 4 --requests {written}", 10),
    ):
        assert replay(words, trace=trace)["requests"] == count
    assert [row["arrival_ns"] for row in rows(written)] == [250_000_000 * number for number in range(10)]
    other = azure(tmp_path / "b.csv", (5, 60, 2), (6, 61, 2))
    body = replay(f"--requests {written} --limit 2", trace=f"{trace} {other} synthetic:requests=5")
    assert (body["requests"], "t.csv" in body["trace"], "b.csv" in body["trace"]) == (6, True, True)
    arrivals = [row["arrival_ns"] for row in rows(written)]
    assert arrivals == sorted(arrivals)


def test_standard_input_and_bad_rows(tmp_path: Path) -> None:
    """`-` reads a pipe; a row that cannot be read is named with its line, and left out with --skip-bad."""
    trace = Path(azure(tmp_path / "t.csv", (0, 100, 5), (1, 100, 5)))
    assert ask("simulate - --json", given=trace.read_bytes()).body["requests"] == 2
    trace.write_text(trace.read_text() + "2024-01-01 00:00:03,many,5\n", encoding="utf-8")
    assert "line 4" in ask(f"simulate {trace}", code=2).line
    body = replay("--skip-bad", trace=str(trace))
    assert body["requests"] == 2
    assert any("1 row" in note and "left out" in note for note in [*body["notes"], *body["reading"]])


def test_lengths_alone_need_arrivals(tmp_path: Path) -> None:
    """--rate, --arrivals, --burstiness and --seed make them."""
    trace, written = tmp_path / "lengths.csv", tmp_path / "r.csv"
    trace.write_text("prompt_tokens,completion_tokens\n" + "100,10\n" * 50, encoding="utf-8")

    def arrivals(words: str) -> list[int]:
        replay(f"--requests {written} {words}", trace=str(trace))
        return [row["arrival_ns"] for row in rows(written)]

    assert arrivals("--rate 10 --arrivals constant") == [100_000_000 * number for number in range(50)]
    assert set(arrivals("--arrivals at-once")) == {0}
    poisson = arrivals("--rate 10")
    assert 2e9 < poisson[-1] < 10e9
    assert arrivals("--rate 10 --seed 0") == poisson != arrivals("--rate 10 --seed 1")
    bursty = "--rate 10 --arrivals bursty --burstiness"
    assert arrivals(f"{bursty} 0.1") != arrivals(f"{bursty} 0.5")


def test_the_size_of_the_traces_blocks(tmp_path: Path) -> None:
    """A hash id stands for 512 tokens unless --trace-block-size says otherwise; too few ids for a prompt are refused."""
    trace = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 4, "hash_ids": [1, 2, 3, %d]}\n'
    trace.write_text(row % (0, 4) + row % (5000, 5), encoding="utf-8")
    for words in ("--trace-block-size 16", ""):  # without: both prompts lie in id 1, but for the token that must be computed
        assert replay(words, trace=str(trace))["prefix"]["hit_tokens"] == 48
    assert "--trace-block-size" in ask(f"simulate {trace} --trace-block-size 8", code=2).line


def test_limits_of_the_engine_hold(tmp_path: Path) -> None:
    """Each option bounds or changes what it is named after."""
    steps, plain, tight = tmp_path / "s.csv", replay(), replay("--num-blocks 500")
    assert plain["preemptions"] == plain["rejected"] == 0
    assert tight["preemptions"] > 0
    assert tight["peak_blocks"] <= 499
    assert replay("--block-size 64")["waste"]["mean_slots"] > 2 * plain["waste"]["mean_slots"]
    assert replay("--max-num-seqs 4")["peak_running"] == 4
    replay(f"--max-num-batched-tokens 256 --steps {steps}")
    assert max(row["sched_tokens"] for row in rows(steps)) == 256
    assert 0 < replay("--max-model-len 700")["rejected"] < 300
    assert plain["prefix"]["hit_tokens"] > 0 == replay("--no-prefix-caching")["prefix"]["hit_tokens"]
    assert replay("--num-blocks 500 --watermark 0.2")["preemptions"] < tight["preemptions"]
    assert replay("--num-blocks 500 --no-reserve-full-isl")["preemptions"] > tight["preemptions"]
    ahead = replay("--async-scheduling")
    assert ahead["settings"]["async_scheduling"] is True
    assert ahead["steps"] != plain["steps"] == replay("--no-async-scheduling")["steps"]


@pytest.mark.parametrize(
    ("model", "flags", "kinds"),
    [
        (LLAMA, "--max-model-len 8k", set()),
        ("openai/gpt-oss-20b", "--no-enable-prefix-caching", {"full", "sliding"}),
        ("google/gemma-3-12b-it", "--max-num-seqs 64", {"full", "sliding"}),
        ("nvidia/Nemotron-H-56B-Base-8K", "-tp 2 --max-num-seqs 128", {"full", "mamba"}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "-tp 4 --max-num-batched-tokens 4096", {"full", "mamba"}),
    ],
)
def test_a_plan_is_replayed(model: str, flags: str, kinds: set[str], tmp_path: Path) -> None:
    """The plan's blocks, groups and limits, from its file or made from the command; both give the same run."""
    command, file = f"--gpu H100 -- vllm serve {model} {flags}", tmp_path / "plan.json"
    answer = ask(f"plan --json {command}")
    file.write_text(answer.out, encoding="utf-8")
    plan, from_file, made = answer.body, replay(f"--plan {file}"), replay(command)
    settings = made["settings"]
    assert {group["kind"] for group in settings["groups"]} == kinds
    from_kv, from_settings = "num_blocks block_size max_model_len", "max_num_seqs max_num_batched_tokens async_scheduling"
    assert all(settings[name] == plan["kv"][name] for name in from_kv.split())
    assert all(settings[name] == plan["settings"][name] for name in from_settings.split())
    assert settings["prefix_caching"] is ("--no-enable-prefix-caching" not in flags)
    assert made["finished"] + made["rejected"] == 300
    assert {**from_file, "wall_seconds": 0} == {**made, "wall_seconds": 0}
    assert replay(f"--plan {file} --num-blocks 8000 --max-num-seqs 3 --max-model-len 8k")["peak_running"] <= 3


def test_what_the_scheduler_is_told_after_the_dashes_is_replayed_or_noted() -> None:
    """Policy, threshold, chunking and watermark of the command; a note for what cannot be replayed or would not start."""
    serve = "--gpu H100 -- vllm serve meta-llama/Llama-3.1-8B"
    flags = "--scheduling-policy priority --long-prefill-token-threshold 512 --watermark 0.1 --no-scheduler-reserve-full-isl"
    told = replay(f"{serve} --max-model-len 8k {flags}")["settings"]
    assert (told["policy"], told["long_prefill_token_threshold"], told["watermark"]) == ("priority", 512, 0.1)
    assert told["reserve_full_isl"] is False
    whole = "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs 64 --max-model-len 8192 -pp 2"
    made = replay(f"--vllm 0.31.0 {serve} {whole}")
    assert made["settings"]["chunked_prefill"] is False
    notes = [*made["notes"], *replay(f"{serve} --max-model-len 8k --max-num-active-seqs 2")["notes"]]
    notes += replay("--gpu L4 -- vllm serve meta-llama/Llama-3.1-8B --max-model-len 131072")["notes"]
    left_out = "--enable-lora --kv-offloading-size 4 --max-num-scheduled-tokens 512 -dcp 1"
    notes += replay(f"{serve} --max-model-len 8k {left_out}")["notes"]
    notes += replay("--gpu H100 -- vllm serve Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 8k")["notes"]
    directions = cases("cli", "how_a_replay_differs")
    for said in ("pipeline", "0.31.0", *directions, "does not start: startup."):
        assert any(said in note for note in notes), said


# Where step times come from: fitted, kept and used again for other options.

TRAFFIC = CAPTURES / "vllm-0.25.1-h200-traffic"
RUN = str(TRAFFIC / "tight.requests.jsonl.gz")
ENGINE = "--num-blocks 2048 --async-scheduling"


def test_engines_that_wait_for_each_other_are_replayed_so_or_it_is_said() -> None:
    """A mixture's data-parallel engines step together; where another number is replayed, a note says which way that errs."""
    command = "--gpu H100 -- vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --data-parallel-size 2"
    for replicas, is_said in (("", False), ("--replicas 4", False), ("--replicas 3", True)):
        notes = replay(f"{replicas} {command}", trace=SMALL)["notes"]
        assert any("wait for each other" in note for note in notes) is is_said


def test_what_was_learnt_is_kept_and_used_again(tmp_path: Path) -> None:
    """The same options give the same run; others are replayed with the same times, also with a larger budget."""
    kept, series = tmp_path / "times.json", TRAFFIC / "tight.series.csv.gz"
    fitted = replay(f"{ENGINE} --fit {RUN} --fit-series {series} --save-times {kept}", trace=RUN)
    again = replay(f"{ENGINE} --times {kept}", trace=RUN)
    assert all(again[name] == fitted[name] for name in ("steps", "sim_seconds", "ttft", "tpot", "preemptions"))
    assert again["step_time"]["label"].startswith("fitted to 500 measured requests")
    assert not any("does not match" in note for note in fitted["notes"]), "a first token by chance a step later is no poor fit"
    larger = "--num-blocks 9000 --max-num-batched-tokens 8192 --async-scheduling"
    assert replay(f"{larger} --times {kept}", trace=RUN)["preemptions"] == 0


@pytest.mark.real
def test_a_fit_under_the_wrong_options_is_a_rough_guide(tmp_path: Path) -> None:
    """A cache that the run did not have: the fit cannot match, says so first, and is not taken for a good one when kept."""
    kept, engine = tmp_path / "times.json", "--num-blocks 700 --async-scheduling"
    for times in (f"--fit {RUN} --save-times {kept}", f"--times {kept}"):
        answer = replay(f"{engine} {times}", trace=RUN)
        assert any("does not match its run" in note for note in answer["notes"])
        assert answer["reading"][0].startswith("The fit does not match its run")
        assert answer["step_time"]["label"].startswith("rough guide: poor fit; fitted to")
    text = ask(f"simulate {RUN} {engine} --times {kept}").out
    assert text.splitlines()[2].startswith("  The fit does not match its run")
    assert text.count("does not match its run") == 1
    assert "  rough guide: poor fit\n" in text
    assert "  step times fitted to 500 measured requests" in text
    text = ask(f"sweep {RUN} max_num_seqs=8,16 {engine} --times {kept}").out
    assert "  rough guide: poor fit; fitted to" in text
    assert text.index("The fit does not match its run") < text.index("max_num_seqs")


def test_a_run_that_no_times_come_near_teaches_nothing(tmp_path: Path) -> None:
    """A fit that is off by several times what was measured is none: one line with the figure, not times that look measured."""
    row = '{"schema": "plimsoll.request/1", "arrival": %d, "first_token": %d.01, "finished": %d.02, "prompt_tokens": 9, '
    lines = [f'{row % (at, at, at)}"output_tokens": 9000}}\n' for at in range(20)]
    (tmp_path / "run").write_text("".join(lines), encoding="utf-8")
    assert "nothing can be learnt from that" in ask(f"simulate {SMALL} --fit {tmp_path / 'run'}", code=2).line


# What a user or the world does wrong.
def _plan(**changes: object) -> dict[str, object]:
    kv = {"num_blocks": 100, "block_size": 16, "max_model_len": 4096, "groups": [{"kind": "full", "block_size": 16}]}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    return {"schema": "plimsoll.plan/1", "kv": {**kv, **changes}, "settings": limits}


@each(("words", "text", "said"), cases("cli", "a_file_that_is_not_what_it_should_be"))
def test_a_file_that_is_not_what_it_should_be(
    words: str, text: str | dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan, or one with a number that cannot be; no trace, with its line; no step times: exit 2 and one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / words.split()[-1]).write_text(text if isinstance(text, str) else json.dumps(_plan(**text)), encoding="utf-8")
    assert said in ask(words.replace("RUN", RUN), code=2).line


@each("name", ["--steps", "--requests", "--html"])
def test_what_cannot_be_written_is_the_worlds_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such folder, a folder, a disk that is full at the first row or at the last: one line with the path, exit code 3."""
    monkeypatch.chdir(tmp_path)
    for path in ("no/such/folder/f.csv", ".", "no/such/folder/f.csv.gz", "/dev/full"):
        line = ask(f"simulate {SMALL} {name} {path}", code=3).line
        assert ("cannot be written" in line, path in line) == (True, True)


WRITTEN = {
    "simulate": ("--steps", "--requests", "--html", "--save-times"),
    "tune": ("--commands", "--save-times"),
    "sweep": ("--csv", "--save-times"),
}


@each(("command", "name"), [(command, name) for command, names in WRITTEN.items() for name in names])
def test_a_trace_is_never_overwritten(command: str, name: str, tmp_path: Path) -> None:
    """An output that is the input, also by another name, is refused before anything is opened."""
    trace, link = tmp_path / "t.csv", tmp_path / "link.csv"
    trace.write_text(f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44\n", encoding="ascii")
    if not link.exists():
        link.symlink_to(trace)
    before = trace.read_bytes()
    reads = ("--fit", "--fit-series", "--times", *(["--plan"] if command != "tune" else []))
    for words in (str(trace), *(f"{SMALL} {read} {trace}" for read in reads)):
        assert "overwrite" in ask(f"{command} {words} {name} {link}", code=2).line
    assert trace.read_bytes() == before


@pytest.mark.real
def test_an_interruption_and_a_reader_that_went_away(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run is one line and exit code 130; `| head` is nobody's fault: exit 0 and not a word."""
    pipe = tmp_path / "steps"
    os.mkfifo(pipe)
    words = ["simulate", "synthetic:requests=3000,rate=1", "--steps", str(pipe)]
    # A shell starts what it puts into the background deaf to Ctrl-C, and its children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "plimsoll", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        with pipe.open() as steps:  # until it is read from, the run cannot go on: it is in the middle for certain
            assert steps.readline().startswith("step,")
            run.send_signal(signal.SIGINT)
            while steps.read(1 << 20):
                pass
        out, err = run.communicate()
    assert (run.returncode, out, err.removeprefix(COMPILING + "\n")) == (130, "", "plimsoll: interrupted\n")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "plimsoll", "simulate", SMALL, "--json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr.removeprefix(COMPILING + "\n")) == (0, "")
