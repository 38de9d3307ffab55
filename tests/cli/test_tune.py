"""`plimsoll tune` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.answers import LLAMA, ask

CHATS = "synthetic:requests=300,rate=0.8,prompt=1000,output=200,prompt_max=4096,seed=3"
SPACE = "max_num_seqs=16,32,64 max_num_batched_tokens=512,2048 block_size=16 gpu_memory_utilization=0.92,0.94,0.99"
L4 = "--gpu L4 --vllm 0.32.0"
SERVER = f"{L4} -- vllm serve {LLAMA} --max-model-len 8192"
PROMISE = "--slo ttft=5s,tpot=200ms"
LEARNT = {
    "schema": "plimsoll.step-time/1", "fitted": "fitted to 500 measured requests", "base_ns": 64_000_000, "token_ns": 222_000,
    "seq_ns": 10_000, "ctx_ps": 500_000, "by_tokens": None,
}  # fmt: skip


def tuned(words: str = "") -> dict[str, Any]:
    """The JSON of a call that found something."""
    return ask(f"tune {CHATS} {SPACE} {PROMISE} --json {words} {SERVER}").body


def test_the_answer_feeds_others_and_is_safe(tmp_path: Path) -> None:
    """A command as words, its whole plan, and a file that plan --compare and simulate --plan take; 0.99 is never tried."""
    commands, answer = tmp_path / "commands", tmp_path / "tuning.json"
    body = tuned(f"--commands {commands}")
    assert (body["schema"], body["command"][:3]) == ("plimsoll.tune/1", ["vllm", "serve", LLAMA])
    plan = body["plan"]
    assert (plan["schema"], plan["fits"], plan["findings"]) == ("plimsoll.plan/1", True, [])
    assert all(plan["settings"][name] == body["chosen"][name] for name in ("max_num_seqs", "gpu_memory_utilization"))
    assert body["cost"]["never_run_because_unsafe"] == 8, "all that have 0.99, the own 256 at once among them"
    assert {one["setting"]["gpu_memory_utilization"] for one in body["tried"]} == {0.92, 0.94}
    compared = ask(f"plan {L4} --compare {commands} --json").body["compare"]
    assert len(compared) == 3
    assert compared[0]["plan"]["kv"] == plan["kv"]
    answer.write_text(json.dumps(body), encoding="utf-8")
    replayed = ask(f"simulate synthetic:requests=20,rate=1 --plan {answer} --json").body
    assert replayed["settings"]["num_blocks"] == plan["kv"]["num_blocks"]


def test_a_fit_makes_it_a_recommendation_unless_it_is_poor(tmp_path: Path) -> None:
    """Times that were learnt count as measured; of a poor fit the label says so, and the warning stands above the finding."""
    times = tmp_path / "times.json"
    times.write_text(json.dumps(LEARNT), encoding="utf-8")
    body = tuned(f"--times {times}")
    assert (body["label"], body["fitted"], body["ranges"]) == ("recommendation", LEARNT["fitted"], None)
    times.write_text(json.dumps({**LEARNT, "is_poor": True}), encoding="utf-8")
    body = tuned(f"--times {times}")
    assert (body["label"], body["fitted"]) == ("rough guide: poor fit", LEARNT["fitted"])
    assert body["reading"][0].startswith("The fit does not match its run:")
    text = ask(f"tune {CHATS} {SPACE} {PROMISE} --times {times} {SERVER}").out
    assert "  rough guide: poor fit; step times fitted to 500 measured requests\n" in text
    assert text.index("The fit does not match its run") < text.index("  Set --max-num")
    assert (text.count("does not match its run"), "recommendation" in text) == (1, False)


def test_the_recorders_folder_is_a_trace(tmp_path: Path) -> None:
    """All its files together, the half-written line of a live one left out."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    for part in range(2):
        row = {"schema": "plimsoll.request/1", "prompt_tokens": 900, "output_tokens": 150}
        lines = [json.dumps({**row, "arrival": 1e9 + 2 * (part * 40 + n)}) for n in range(40)]
        text = "\n".join(lines) + '\n{"schema": "plims'
        (folder / f"requests-2026010{part}T000000Z-7.jsonl").write_text(text, encoding="utf-8")
    assert ask(f"tune {folder} {SPACE} --json {SERVER}").body["traffic"]["requests"] == 80


def test_several_engines_are_tuned_together(tmp_path: Path) -> None:
    """All of them share the traffic in every replay, and what tune promises is what `simulate` makes of its plan."""
    answer, chats = tmp_path / "tuning.json", CHATS.replace("rate=0.8", "rate=3")
    small = "max_num_seqs=32,64 max_num_batched_tokens=512 block_size=16 gpu_memory_utilization=0.92,0.94"
    words = f"tune {chats} {small} {PROMISE} --json"
    for engines in ("--data-parallel-size 3", ""):
        server = f"--replicas 3 {SERVER}" if not engines else f"{SERVER} {engines}"
        body = ask(f"{words} {server}").body
        assert body["engines"] == {"number": 3, "router": "least-load", "together": 1}
        assert any("3 engines with these flags share the traffic" in note for note in body["notes"])
        answer.write_text(json.dumps(body), encoding="utf-8")
        replicas = "" if engines else "--replicas 3"
        replayed = ask(f"simulate {chats} --plan {answer} {replicas} --json").body
        assert len(replayed["engines"]) == 3
        assert [replayed[name]["p99"] for name in ("ttft", "tpot")] == [
            body["score"][name] for name in ("ttft_p99", "tpot_p99")
        ]
        assert replayed["preemptions"] == body["score"]["preemptions"]
    assert "--keep finds how many servers it takes" in ask(f"{words} --keep 99 --replicas 3 {SERVER}", code=2).line


def test_flags_for_the_share_of_one_server_are_taken_where_fewer_servers_keep_the_promise() -> None:
    """What is best for all of the traffic on one server need not be: the answer says so, and its trials show it."""
    small = "max_num_seqs=4,8,16 max_num_batched_tokens=512,2048 block_size=16 gpu_memory_utilization=0.9"
    chats = "synthetic:requests=120,rate=12,prompt=600,output=100,seed=3"
    body = ask(f"tune {chats} {small} --slo ttft=1s,tpot=80ms --keep 95 --json {SERVER}").body
    servers = body["capacity"]["servers"]
    assert f"the flags are chosen for the share of one of {servers + 1} servers" in body["notes"]
    shares = {one["servers"]: one["share"] for one in body["capacity"]["trials"] if one["speedup"] == 1.0}
    assert shares[servers - 1] < 0.95 <= shares[servers]


def test_cards_are_compared_by_what_they_keep_and_cost(tmp_path: Path) -> None:
    """How many of each card keep the promise, the cheapest first, with the command of each; none where none keeps it."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"date": "2026-11-01", "usd_per_gpu_hour": {"L4": 0.7, "H100": 2.5}}', encoding="utf-8")
    small = "max_num_seqs=16 max_num_batched_tokens=512 block_size=16 gpu_memory_utilization=0.9"
    words = f"tune synthetic:requests=40,rate=2,prompt=200,output=30 {small} --gpu H100x2,L4 --prices {prices} --vllm 0.32.0"
    serve = f"-- vllm serve {LLAMA} --max-model-len 4096"
    body = ask(f"{words} --slo ttft=5s --keep 90 --json {serve}").body
    assert [(card["gpu"], card["gpus"], card["usd_per_hour"]) for card in body["cards"]] == [("L4", 1, 0.7), ("H100x2", 2, 5.0)]
    assert body["cards"][1]["command"][-2:] == ["--tensor-parallel-size", "2"]
    answer = ask(f"{words} --slo ttft=5s --keep 90 {serve}")
    assert all(said in answer.text for said in ("dollars an hour", "Headroom: ", "prices of 2026-11-01"))
    body = ask(f"{words} --slo tpot=1ms --keep 90 --json {serve}", code=1).body
    assert {card["gpus"] for card in body["cards"]} == {None}
    prices.write_text('{"date": "2026-11-01", "usd_per_gpu_hour": {"L4": -1}}', encoding="utf-8")
    assert "the price of L4 is not a number of dollars above 0" in ask(f"{words} --slo ttft=5s --keep 90 {serve}", code=2).line


def test_shapes_are_compared_as_cards_are() -> None:
    """Every combination is planned and searched; one that does not fit is a row with its reason; what another beats is said."""
    small = "max_num_seqs=16 max_num_batched_tokens=512 block_size=16 gpu_memory_utilization=0.9"
    words = f"tune synthetic:requests=40,rate=2,prompt=200,output=30 {small} --gpu L4 --vllm 0.32.0 --slo ttft=5s --keep 90"
    serve = f"-- vllm serve {LLAMA} --max-model-len 4096"
    cards = ask(f"{words} kv_cache_dtype=auto,fp8 tensor_parallel_size=1,2 --json {serve}").body["cards"]
    by_name = {card["gpu"]: card for card in cards}
    assert sorted(by_name) == [
        "L4 KV auto tp 1", "L4 KV auto tp 1, 2 servers", "L4 KV auto tp 2",
        "L4 KV fp8 tp 1", "L4 KV fp8 tp 1, 2 servers", "L4 KV fp8 tp 2",
    ]  # fmt: skip
    assert by_name["L4 KV fp8 tp 1, 2 servers"]["gpus"] == 2, "beside one server on two cards"
    assert [by_name[f"L4 KV fp8 tp {size}"]["gpus"] for size in (1, 2)] == [1, 2]
    assert "fp8" in by_name["L4 KV fp8 tp 1"]["command"]
    for card in cards:
        if card["beaten_by"] is not None:
            other, own = by_name[card["beaten_by"]], card
            assert other["gpus"] <= own["gpus"]
            assert other["capacity"]["highest_requests_per_second"] >= own["capacity"]["highest_requests_per_second"]
    assert "too long for it and refused" in ask(f"{words} max_model_len=300,4096 {serve}").text
    assert "max_model_len=8k;x: values with commas" in ask(f"{words} 'max_model_len=8k;x' {serve}", code=2).line
