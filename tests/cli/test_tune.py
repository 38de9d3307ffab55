"""`plimsoll tune` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.main import main
from tests.each import each

RUN = str(Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-traffic" / "tight.requests.jsonl.gz")
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CHATS = "synthetic:requests=300,rate=0.8,prompt=1000,output=200,prompt_max=4096,seed=3"
SPACE = ["max_num_seqs=16,32,64", "max_num_batched_tokens=512,2048", "block_size=16", "gpu_memory_utilization=0.92,0.94,0.99"]
SERVER = ["--", "vllm", "serve", LLAMA, "--max-model-len", "8192"]
WORDS = [CHATS, *SPACE, "--gpu", "L4", "--vllm", "0.32.0", "--slo", "ttft=5s,tpot=200ms"]


def tuned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON of a call that found something."""
    assert main(["tune", *WORDS, "--json", *words, *SERVER]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_answer_feeds_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command as words, its whole plan, and a file that plan --compare and simulate --plan take."""
    commands, answer = tmp_path / "commands", tmp_path / "tuning.json"
    body = tuned(capsys, "--commands", str(commands))
    assert body["schema"] == "plimsoll.tune/1"
    assert body["command"][:3] == ["vllm", "serve", LLAMA]
    assert body["plan"]["schema"] == "plimsoll.plan/1"
    assert body["plan"]["settings"]["max_num_seqs"] == body["chosen"]["max_num_seqs"]
    assert body["plan"]["settings"]["gpu_memory_utilization"] == body["chosen"]["gpu_memory_utilization"]
    assert body["plan"]["fits"]
    assert body["plan"]["findings"] == []
    assert main(["plan", "--gpu", "L4", "--vllm", "0.32.0", "--compare", str(commands), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert len(compared) == 3
    assert compared[0]["plan"]["kv"] == body["plan"]["kv"]
    answer.write_text(json.dumps(body), encoding="utf-8")
    assert main(["simulate", "synthetic:requests=20,rate=1", "--plan", str(answer), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["num_blocks"] == body["plan"]["kv"]["num_blocks"]


def test_nothing_unsafe_is_chosen_or_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """0.99 of the card is in the space and nowhere in the answer."""
    body = tuned(capsys)
    assert body["cost"]["never_run_because_unsafe"] == 8, "all that have 0.99, the own 256 at once among them"
    assert {one["setting"]["gpu_memory_utilization"] for one in body["tried"]} == {0.92, 0.94}


def test_the_screen_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags, the label, the reasons, the runner-up, the margin, the curve; and a page of the same."""
    page = tmp_path / "x.html"
    assert main(["tune", *WORDS, "--html", str(page), *SERVER]) == 0
    text = capsys.readouterr().out
    for part in (
        "rough guide: not fitted",
        "Set --max-num-",
        "Runner-up:",
        "Margin:",
        "requests a second as promised",
        "--fit",
    ):
        assert part in text, part
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    assert "src=" not in html


def test_a_fit_makes_it_a_recommendation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times that were learnt before count as measured, and no range is given."""
    times = tmp_path / "times.json"
    learnt = {"schema": "plimsoll.step-time/1", "fitted": "fitted to 500 measured requests", "base_ns": 64_000_000,
              "token_ns": 222_000, "seq_ns": 10_000, "ctx_ps": 500_000, "by_tokens": None}  # fmt: skip
    times.write_text(json.dumps(learnt), encoding="utf-8")
    body = tuned(capsys, "--times", str(times))
    assert body["label"] == "recommendation"
    assert body["fitted"] == "fitted to 500 measured requests"
    assert body["ranges"] is None


def test_a_poor_fit_is_no_recommendation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times that did not match their own run: the label says so, and the warning stands above the finding, also on the page."""
    times, page = tmp_path / "times.json", tmp_path / "x.html"
    learnt = {"schema": "plimsoll.step-time/1", "fitted": "fitted to 500 measured requests", "is_poor": True,
              "base_ns": 64_000_000, "token_ns": 222_000, "seq_ns": 10_000, "ctx_ps": 500_000, "by_tokens": None}  # fmt: skip
    times.write_text(json.dumps(learnt), encoding="utf-8")
    body = tuned(capsys, "--times", str(times), "--html", str(page))
    assert body["label"] == "rough guide: poor fit"
    assert body["fitted"] == "fitted to 500 measured requests"
    assert body["reading"][0].startswith("The fit does not match its run:")
    html = page.read_text(encoding="utf-8")
    assert "recommendation" not in html
    assert "rough guide: poor fit" in html
    assert html.index("The fit does not match its run") < html.index("<pre>")
    assert main(["tune", *WORDS, "--times", str(times), *SERVER]) == 0
    text = capsys.readouterr().out
    assert "  rough guide: poor fit; step times fitted to 500 measured requests\n" in text
    assert text.index("The fit does not match its run") < text.index("  Set --max-num")
    assert text.count("does not match its run") == 1
    assert "recommendation" not in text


def test_the_recorders_folder_is_a_trace_and_drift_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cron line: all its files together, the half-written line of a live one left out, and what has changed since."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    for part in range(2):
        lines = [
            json.dumps(
                {
                    "schema": "plimsoll.request/1",
                    "arrival": 1e9 + 2 * (part * 40 + n),
                    "prompt_tokens": 900,
                    "output_tokens": 150,
                }
            )
            for n in range(40)
        ]
        (folder / f"requests-2026010{part}T000000Z-7.jsonl").write_text(
            "\n".join(lines) + '\n{"schema": "plims', encoding="utf-8"
        )
    last = tmp_path / "last.json"
    words = ["tune", str(folder), *SPACE, "--gpu", "L4", "--vllm", "0.32.0", "--json"]
    assert main([*words, *SERVER]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["traffic"]["requests"] == 80
    assert first["drift"] == []
    first["traffic"]["prompt_mean"] /= 2
    last.write_text(json.dumps(first), encoding="utf-8")
    assert main([*words, "--last", str(last), *SERVER]) == 0
    second = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in second["drift"] if one["is_large"]] == ["prompt_mean"]
    assert any("tokens in a prompt" in sentence for sentence in second["reading"])


def test_a_second_call_does_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --into the answer comes from the file, and it is the same."""
    kept = tmp_path / "kept"
    first = tuned(capsys, "--into", str(kept))
    size = kept.stat().st_size
    assert tuned(capsys, "--into", str(kept)) == first
    assert kept.stat().st_size == size


def test_no_safe_setting_is_exit_1_with_plans_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """The context does not fit: the finding, and the flag that would clear it."""
    assert main(["tune", CHATS, "--gpu", "L4", "--vllm", "0.32.0", "--model", LLAMA]) == 1
    text = capsys.readouterr().out
    assert "No setting is safe: startup.context-too-long" in text
    assert "--max-model-len" in text
    assert main(["tune", CHATS, "--gpu", "L4", "--vllm", "0.32.0", "--model", LLAMA, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["chosen"], body["command"], body["plan"]) == (None, None, None)


def test_the_advice_says_where_it_goes_and_what_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that takes the flag, since tune has none of its own; the finding with its figures."""
    assert main(["tune", CHATS, "--gpu", "L4", "--vllm", "0.32.0", "--model", LLAMA]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"behind `--`: -- vllm serve {LLAMA} ... --max-model-len" in said
    assert "replayed as if it did" not in said
    assert main(["tune", CHATS, "--gpu", "H100", "--vllm", "0.32.0", "--model", "Qwen/Qwen2.5-72B-Instruct"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "No setting is safe: startup.weights-do-not-fit: the weights do not fit: the weights of one GPU take" in said
    assert "--tensor-parallel-size 4" in said


@pytest.mark.parametrize(
    ("promise", "why", "try_this"),
    [
        ("tpot=5ms", "for each further token", "More servers like it would not help"),
        ("ttft=1ms,tpot=10s", "come a second, and no setting does more than", "--speedup"),
    ],
)
def test_no_promise_kept_is_no_recommendation(
    promise: str, why: str, try_this: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is called right, no habit is judged and no curve of zeros is drawn: the reason, and what else could be tried."""
    words = [CHATS, *SPACE, "--gpu", "L4", "--vllm", "0.32.0", "--slo", promise]
    assert main(["tune", *words, *SERVER]) == 1
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert "No setting serves a single request as promised" in said
    assert why in said
    assert try_this in said
    for absent in ("right as they are", "wrong here", "Runner-up:", "requests a second as promised\n"):
        assert absent not in text


def test_a_command_without_a_cache_is_told_the_flag_that_gives_it_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A fit replays the command, and so it must have a cache: that is wrong input, in one line."""
    assert main(["tune", *WORDS, *SERVER, "--gpu-memory-utilization", "0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--gpu-memory-utilization 0.94" in said
    assert "Your own flags are not safe: startup.no-cache-blocks" in said
    assert "replayed as if it did" not in said, "what plan objects to is never run"
    words = ["tune", RUN, "--fit", RUN, "--gpu", "L4", "--model", "meta-llama/Llama-3.3-70B-Instruct"]
    assert main(words) == 2
    assert "the plan leaves no KV block" in capsys.readouterr().err


@each(
    "words",
    [
        [],
        [CHATS],
        [CHATS, "--model", LLAMA],
        ["--model", LLAMA, "--gpu", "L4"],
        [CHATS, "--model", LLAMA, "--gpu", "L4", "--slo", "ttft=2"],
        [CHATS, "--model", LLAMA, "--gpu", "L4", "bogus=3"],
        [CHATS, "--model", LLAMA, "--gpu", "L4", "--last", "/nowhere"],
        [CHATS, "--model", LLAMA, "--gpu", "L4", "--bogus"],
        [CHATS, "--model", LLAMA, "--gpu", "L4", "--", "vllm", "serve", LLAMA],
        ["/tmp", "--model", LLAMA, "--gpu", "L4"],
    ],
)
def test_wrong_input_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, never a traceback."""
    assert main(["tune", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plimsoll: ")
    assert said.count("\n") == 1
