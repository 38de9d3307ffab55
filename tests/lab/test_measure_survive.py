"""The way of measure_survive.py through a GPU's host, played with a stand-in for vLLM, torch and nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from lab.gpu.survive_host import told_in
from lab.gpu.survive_load import Answer, compare_ids, dechunked, first_difference, longest_standstill, read_answer, requests_of
from lab.gpu.survive_plan import Plan, last_value
from tests.each import each

ROOT = Path(__file__).parents[2]
CONTENT: dict[str, Any] = json.loads((ROOT / "lab" / "gpu" / "survive_runs.json").read_text(encoding="utf-8"))
LINE = (
    "(EngineCore pid=7) WARNING 11-17 20:01:02 [contain.py:88] plimsoll: survive: contained failure 3: a step of 8192 tokens "
    "in 48 requests ran out of device memory at forward (asked for 1.95 GiB, 1.10 GiB free); 48 requests preempted, 190000 "
    "tokens to recompute; steps of at most 4096 tokens and 48 sequences from here\n"
)
SERVER = """
import hashlib, importlib, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
importlib.import_module("vllm.v1.worker.gpu_worker")  # waits at the gate
SURVIVES = bool(os.environ.get("PLIMSOLL_SURVIVE"))
if SURVIVES:
    print("plimsoll: survive: armed (vLLM 0.25.1, second runner, asynchronous scheduling)", flush=True)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def reply(self, body, kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        state = {"survive": {"armed": SURVIVES, "tokens_per_step": {"now": 4096, "start": 8192}}}
        self.reply(json.dumps(state).encode() if "state" in self.path else b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        prompt = body.get("prompt", [])
        if "compact" in self.path:
            return self.reply(b'{"workers": [{"returned": 5}]}')
        if body.get("prompt_logprobs") and os.environ.get("PLIMSOLL_ADMIT"):
            return self.reply(b'{"error": {"message": "the certificate does not cover it"}}', status=400)
        if len(prompt) > 3000:
            if not SURVIVES:
                os._exit(1)
            print(os.environ["STAND_IN_LINE"], flush=True)
        ids = [int(hashlib.md5(f"{prompt} {i}".encode()).hexdigest()[:4], 16) for i in range(body["max_tokens"])]
        if not body.get("stream"):
            return self.reply(json.dumps({"choices": [{"token_ids": ids}]}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(0.05)
        events = [{"choices": [{"token_ids": ids[i : i + 50]}]} for i in range(0, len(ids), 50)]
        events.append({"choices": [], "usage": {"completion_tokens": len(ids)}})
        for text in [*(json.dumps(event) for event in events), "[DONE]"]:
            data = f"data: {text}\\n\\n".encode()
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
            time.sleep(0.05)
        self.wfile.write(b"0\\r\\n\\r\\n")
        self.close_connection = True
class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
port = int(sys.argv[sys.argv.index("--port") + 1])
Server(("127.0.0.1", port), Handler).serve_forever()
"""
TORCH = """
int8 = 1
def empty(size, dtype, device): return type("T", (), {"numel": lambda self: size})()
class cuda:
    mem_get_info = staticmethod(lambda: (142629 << 20, 143155 << 20))
    empty_cache = synchronize = staticmethod(lambda: None)
"""
SMI = '#!/bin/sh\ncase "$*" in *memory.free*) echo 90;; *) echo 0;; esac\n'


def stand_in_host(folder: Path) -> dict[str, str]:
    """An environment in which vLLM, torch and nvidia-smi are stand-ins."""
    for name in ("vllm/entrypoints/openai", "vllm/v1/worker", "torch", "bin"):
        (folder / name).mkdir(parents=True)
    for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai", "vllm/v1", "vllm/v1/worker"):
        (folder / package / "__init__.py").touch()
    (folder / "vllm" / "v1" / "worker" / "gpu_worker.py").touch()
    (folder / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(SERVER, encoding="utf-8")
    (folder / "torch" / "__init__.py").write_text(TORCH, encoding="utf-8")
    (folder / "bin" / "nvidia-smi").write_text(SMI, encoding="utf-8")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")])
    programs = f"{folder / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": path, "PATH": programs, "OUT": str(folder / "out"), "STAND_IN_LINE": LINE.strip()}


@pytest.mark.timeout(120)
@pytest.mark.soak
def test_a_call_plays_waves_of_servers_and_leaves_results_and_logs(tmp_path: Path) -> None:
    """Plain servers die, contained ones live, the door refuses; a second call makes nothing twice."""
    wanted = [
        "neighbour-small-eager-1-plain-1", "neighbour-small-eager-1-contained-1", "logits-small-eager-0-door-1",
        "neighbour-small-graphs-1-plain-1", "trial-first-runner-093",
    ]  # fmt: skip
    env = stand_in_host(tmp_path)
    models = tmp_path / "work" / "models" / "llama-4-layers"
    models.mkdir(parents=True)
    (models / "config.json").write_text("{}", encoding="utf-8")  # there already: no tokenizer is made
    command = [sys.executable, "-m", "lab.gpu.measure_survive", "small", "trial"]
    command += ["--only", ",".join(wanted), "--budget-s", "400", "--work", str(tmp_path / "work"), "--anew"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "survive-small-trial.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == wanted
    plain, contained, door = (rows[name] for name in wanted[:3])
    assert (plain["died"], plain["round"]["served"], plain["after"]["lost"]) == (True, 0, 12)
    assert contained["round"]["served"] == 48
    assert contained["round"]["contained"] == 16
    assert contained["round"]["tokens_as_undisturbed"] == {"compared": 48, "equal": 48, "first_differences": []}
    assert contained["again"]["served"] == 48
    assert contained["steps"]["round"] == 4096
    assert (door["round"]["served"], door["round"]["refused"], door["round"]["killers_refused"]) == (46, 2, 2)
    assert rows["trial-first-runner-093"]["died_inside"]  # the stand-in cannot serve long prompts
    with tarfile.open(tmp_path / "out" / "logs-small-trial.tar.gz") as archive:
        assert sorted(archive.getnames()) == sorted(f"{name}.log" for name in wanted)
    again = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (again.returncode, again.stdout) == (0, "")


# The list of runs


def test_every_run_of_the_list_has_a_killer_a_shape_and_its_tables() -> None:
    """No run can fail for a name that is written differently, and none stands in a stage twice."""
    plan = Plan(CONTENT, [], is_cpu=False)
    for stage in CONTENT["stages"]:
        runs = plan.runs(stage)
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            model = Path("/models") / plan.model(run)
            flags = plan.flags(run, model, 142629, 0)
            assert plan.killer(run).load["killers"]["n"] + plan.killer(run).load["bystanders"]["n"] == 48
            assert plan.seconds(run) > 0
            if run.way == "door":
                written = ROOT / "lab" / "gpu" / "survive_tables" / f"{run.killer}-{run.shape}.json"
                by_hand = run.killer in CONTENT["tables"]
                table = plan.table(run, flags, model, 142629) if by_hand else json.loads(written.read_text(encoding="utf-8"))
                assert table["model"].rpartition("/")[2] == plan.model(run)
                assert table["assumes"]["max_num_batched_tokens"] == int(last_value(flags, "--max-num-batched-tokens"))
                assert table["assumes"]["max_num_seqs"] == int(last_value(flags, "--max-num-seqs"))
                assert all(
                    kind["bytes_per_unit"] * kind["most_units"] + kind["fixed_bytes"] > table["spare_bytes"]
                    for kind in table["kinds"]
                    if kind["smallest"] is not None
                )


def test_the_recorded_killers_have_the_recorded_caches() -> None:
    """`forward` and `logits` get the KV cache to the byte that failure_runs.json gave them."""
    plan = Plan(CONTENT, [], is_cpu=False)
    runs = {run.name: run for run in plan.runs("rest")}
    for name, leave_mib in (("forward-small-eager-1-plain-1", 4480), ("logits-recorded-small-eager-0-plain-1", 7108)):
        flags = plan.flags(runs[name], Path("/m"), 142629, 0)
        assert last_value(flags, "--kv-cache-memory-bytes") == str((142629 - leave_mib) << 20)


def test_a_wave_fits_the_gpu_and_is_of_one_mode() -> None:
    """Servers share the GPU as far as their memory goes; one that wants it for itself gets it."""
    plan = Plan(CONTENT, [], is_cpu=False)
    for stage in CONTENT["stages"]:
        left = deque(plan.runs(stage))
        while left:
            wave = plan.next_wave(left, 142629)
            assert wave
            assert len({run.mode for run in wave}) == 1
            assert len(wave) == 1 or not any(plan.is_alone(run) for run in wave)
            assert sum(CONTENT["shapes"][run.shape]["need_mib"] for run in wave) < 142629
    assert len(plan.next_wave(deque(plan.runs("8b")), 142629)) == 4


# Reading answers and logs


def answer_of(raw: bytes, asked: int = 3) -> Answer:
    """An answer read from these bytes."""
    answer = Answer(0, is_killer=False, asked=asked)
    read_answer(raw, answer)
    return answer


def stream_of(*events: str) -> bytes:
    """A stream as vLLM's server sends it."""
    parts = [f"data: {event}\n\n".encode() for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks


PIECES = ('{"choices": [{"token_ids": [5, 6]}]}', '{"choices": [{"token_ids": [7]}]}')
USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'


def test_a_whole_stream_is_served_with_its_tokens() -> None:
    """Every id once, as many as were asked for; chunks that break off give what came."""
    answer = answer_of(stream_of(*PIECES, USAGE, "[DONE]") + b"0\r\n\r\n")
    assert (answer.end, answer.ids, answer.wrong) == ("served", [5, 6, 7], "")
    assert dechunked(b"3\r\nabc\r\n5\r\nde") == b"abcde"
    assert dechunked(b"zz\r\nabc") == b""


@each(
    ("raw", "end"),
    [
        (stream_of(*PIECES), "lost"),
        (stream_of(*PIECES)[:-30], "lost"),
        (stream_of(PIECES[0], USAGE, "[DONE]"), "lost"),
        (stream_of(*PIECES, PIECES[1], USAGE, "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "EngineCore encountered an issue."}}', "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "it ran out of device memory alone"}}', "[DONE]"), "aborted"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}", "lost"),
        (b'HTTP/1.1 500 Internal Server Error\r\n\r\n{"error": "plimsoll: aborted"}', "aborted"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_ids": [5, 6, 7]}]}', "served"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_', "lost"),
        (b"", "lost"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_not_served(raw: bytes, end: str) -> None:
    """A missing or repeated token, an error in the stream and a connection that breaks are all told apart from success."""
    assert answer_of(raw).end == end


def test_the_same_load_makes_the_same_requests_but_for_the_salt() -> None:
    """No round finds the last one's prefixes or pictures."""
    load = CONTENT["loads"]["prompts"]
    one, other = requests_of(load, "m", "a"), requests_of(load, "m", "b")
    assert [request.body | {"cache_salt": ""} for request in one] == [request.body | {"cache_salt": ""} for request in other]
    assert one[0].body["cache_salt"] != other[0].body["cache_salt"]
    assert sum(request.is_killer for request in one) == 16
    load = {"killers": {"n": 2, "side": 60, "out": [1, 1]}}
    made = [json.dumps(request.body["messages"]) for salt in ("a", "b") for request in requests_of(load, "m", salt)]
    assert len(set(made)) == 4


def test_a_standstill_is_a_time_without_any_piece() -> None:
    """A stream that waits while another goes on is no standstill."""
    one, other = Answer(0, is_killer=False, asked=1), Answer(1, is_killer=False, asked=1)
    one.pieces, other.pieces = [0.0, 5.0, 9.0], [1.0, 2.0, 3.0, 4.0]
    assert longest_standstill([one, other]) == 4.0
    assert longest_standstill([]) is None


def test_tokens_are_compared_request_by_request() -> None:
    """Equal, different at a place, and shorter; what only one round has is left out."""
    found = {"0": [1, 2, 3], "1": [1, 9, 3], "2": [1, 2], "3": [1]}
    wanted = {"0": [1, 2, 3], "1": [1, 2, 3], "2": [1, 2, 3], "4": [1]}
    assert compare_ids(found, wanted) == {"compared": 3, "equal": 1, "first_differences": [1, 2]}
    assert first_difference([1], [1]) is None


def test_the_log_tells_what_was_contained() -> None:
    """Site, size and the steps that follow, from the line that containment writes."""
    told = told_in("x plimsoll: survive: armed (vLLM 0.25.1, second runner)\n" + LINE)
    assert told["armed"] == "armed (vLLM 0.25.1, second runner)"
    assert told["failures"] == [{"tokens": 8192, "requests": 48, "site": "forward", "recompute": 190000, "steps": 4096}]
    assert told["steps"] == 4096
    grown = LINE + "y plimsoll: survive: growing back: steps of at most 6144 tokens and 256 sequences\n"
    assert told_in(grown)["steps"] == 6144
    assert told_in("plimsoll: survive: not armed: two ranks\n")["armed"] == "not armed: two ranks"
