"""Every trace format, against the oracle's own reader where it has one, and by hand where it has not."""

from __future__ import annotations

import datetime
import gzip
import importlib.util
import io
import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate.trace import Arrivals, Trace
from plimsoll.simulate.trace_files import read_lengths, read_measured, read_trace

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TRACES = SHARED / "data" / "traces"
RUNS = sorted((TRACES / "real_runs").glob("*_requests.jsonl.gz"))
needs_data = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared data folder is not beside the repository")

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
RECORDED = '{"schema":"plimsoll.request/1","arrival":%s,"prompt_tokens":40,"output_tokens":3%s}\n'


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """The oracle's module; it needs no vLLM to read a trace."""
    before = dict(os.environ)
    spec = importlib.util.spec_from_file_location("vllm_oracle", SHARED / "oracle" / "vllm_oracle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)  # it sets variables for vLLM that other tests must not see
    return module


def read(tmp_path: Path, text: str, **options: object) -> Trace:
    """The trace of a file with this text."""
    (tmp_path / "t").write_text(text, encoding="utf-8")
    return read_trace(str(tmp_path / "t"), **options)  # type: ignore[arg-type]


def ids(trace: Trace) -> list[list[int]]:
    """The prefix ids of every request."""
    return [trace.ids_of(request).tolist() for request in range(trace.size)]


def same_as_oracle(trace: Trace, rows: list[object], block: int) -> None:
    """Field by field, and the ids token by token."""
    columns = {"arrival_ns": trace.arrival_ns, "prompt": trace.prompt, "output": trace.output}
    for name, column in columns.items():
        assert column.tolist() == [getattr(row, name) for row in rows], name
    assert trace.prefix_block == block
    for request, row in enumerate(rows):
        said = getattr(row, "hash_ids", None) or getattr(row, "token_ids", None) or []
        needed = -(-trace.prompt[request] // block)
        assert trace.ids_of(request).tolist() == said[:needed]


@needs_data
@pytest.mark.parametrize("limit", [None, 700])
@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("AzureLLMInferenceTrace_code.csv.gz", 512),
        ("AzureLLMInferenceTrace_conv.csv.gz", 512),
        ("mooncake_arxiv_first1000.jsonl.gz", 512),
        ("mooncake_conversation_trace.jsonl.gz", 512),
        ("mooncake_synthetic_trace.jsonl.gz", 512),
        ("sharegpt_300_hashed.jsonl.gz", 16),
    ],
)
def test_public_traces_are_read_as_the_oracle_reads_them(oracle: ModuleType, name: str, block: int, limit: int | None) -> None:
    """Every request of every public file: same order, same ns, same lengths, same ids."""
    path = str(TRACES / name)
    trace = read_trace(path, limit=limit, prefix_block=block)
    same_as_oracle(trace, oracle.load_trace(path, limit), block)
    assert trace.bad_rows == 0
    assert trace.name == name


@needs_data
def test_servingsim_rows_are_read_as_the_oracle_reads_them(oracle: ModuleType, tmp_path: Path) -> None:
    """Token ids are ids of one token; those beyond the prompt are dropped; rows are sorted by arrival."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"arrival_time_ns": 900, "input_toks": 3, "output_toks": 0, "input_tok_ids": [5, 6, 7]}\n'
        '{"arrival_time_ns": 200, "input_toks": 2, "output_toks": 4, "input_tok_ids": [5, 6, 8]}\n',
        encoding="utf-8",
    )
    trace = read_trace(str(path))
    same_as_oracle(trace, oracle.load_trace(str(path)), 1)
    assert (trace.arrival_ns.tolist(), trace.output.tolist(), ids(trace)) == ([0, 700], [4, 1], [[5, 6], [5, 6, 7]])


@needs_data
def test_lengths_alone_need_a_process() -> None:
    """Without one the missing option is named; with one the rows keep the file's order."""
    path = str(TRACES / "vidur_arxiv_summarization_lengths.csv.gz")
    with pytest.raises(BadInput, match="--rate"):
        read_trace(path)
    trace = read_trace(path, limit=1000, arrivals=Arrivals("poisson", 5.0, seed=3))
    assert (trace.prompt[0], trace.output[0], trace.size) == (3772, 54, 1000)
    assert trace.arrival_ns[0] == 0
    assert np.all(np.diff(trace.arrival_ns) >= 0)
    assert trace.arrival_ns[-1] / 1e9 == pytest.approx(200, rel=0.15)


@pytest.mark.parametrize(
    ("stamps", "ns"),
    [
        (("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901"), 100),
        (("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00"), 990_070_000),
        (("2024-05-10 00:00:00", "2024-05-10T00:00:00.123456789999Z"), 123_456_789),
        (("2024-05-10 00:00:00+00:00", "2024-05-10 02:00:00+01:30"), 1_800_000_000_000),
        (("2024-02-28 23:59:59.999999999", "2024-02-29 00:00:00"), 1),
    ],
)
def test_azure_stamps_are_exact(tmp_path: Path, stamps: tuple[str, str], ns: int) -> None:
    """Both years' spellings, offsets from UTC, a leap day; to the nanosecond."""
    trace = read(tmp_path, AZURE + "".join(f"{stamp},10,2\n" for stamp in stamps))
    assert trace.arrival_ns.tolist() == [0, ns]


def test_burstgpt_failures_are_left_out_and_counted(tmp_path: Path) -> None:
    """Seconds to whole ns by their text; 0 response tokens is that data set's mark of a failure; newer columns do no harm."""
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,9,0,9,API log\n45.100000001,GPT-4,17,3,20,API log\n"
    trace = read(tmp_path, header + rows)
    assert (trace.arrival_ns.tolist(), trace.prompt.tolist(), trace.bad_rows) == ([0, 40_100_000_001], [472, 17], 1)
    newer = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = read(tmp_path, newer + '5,"a, b",1.5,ChatGPT,472,18,490,Conversation log\n')
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([472], [18])


@pytest.mark.parametrize(
    "header", ["prompt_tokens,completion_tokens", "input_length,output_length", "x,num_prefill_tokens,num_decode_tokens"]
)
def test_lengths_are_found_by_their_names(tmp_path: Path, header: str) -> None:
    """Any of the usual column names, in CSV and in JSON lines; 12.0 is 12."""
    names = header.split(",")
    trace = read(tmp_path, f"{header}\n" + ",".join(["7", "12.0", "3"][-len(names) :]) + "\n", arrivals=Arrivals("at-once"))
    assert (trace.prompt.tolist(), trace.output.tolist(), trace.arrival_ns.tolist()) == ([12], [3], [0])
    trace = read(tmp_path, json.dumps({names[-2]: 12, names[-1]: 3}), arrivals=Arrivals("at-once"))
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([12], [3])


def test_a_process_replaces_the_stamps_of_a_file(tmp_path: Path) -> None:
    """The order stays that of the stamps, the times are the process's; arrived_at is in seconds."""
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,10,1\n0.5,20,1\n"
    assert read(tmp_path, text).arrival_ns.tolist() == [0, 2_000_000_000]
    trace = read(tmp_path, text, arrivals=Arrivals("constant", 4.0))
    assert (trace.arrival_ns.tolist(), trace.prompt.tolist()) == ([0, 250_000_000], [20, 10])


def test_ids_of_any_kind_become_numbers_consistently(tmp_path: Path) -> None:
    """Small integers stay; text and huge integers are equal where they were equal; a prompt keeps only the ids it needs."""
    row = '{"timestamp": %s, "input_length": 600, "output_length": 1, "hash_ids": %s}\n'
    huge = 1 << 80
    text = row % (1.5, f'["aa", {huge}, 9]') + row % (0, f'["aa", {huge + 1}]') + row % (2, f"[{huge}, 9]")
    first, second, third = ids(read(tmp_path, text))
    assert [len(one) for one in (first, second, third)] == [2, 2, 2]
    assert (first[0], second[1], third[1]) == (second[0], third[0], 9)
    assert first[1] != second[1]
    assert min(first + second + third) >= 0


def test_a_block_size_that_cannot_cover_the_prompt_is_named(tmp_path: Path) -> None:
    """The line, and the option that is probably wrong."""
    text = '{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]}\n'
    with pytest.raises(BadInput, match=r"line 1: 2 hash_ids cannot cover 100 tokens at --trace-block-size 16"):
        read(tmp_path, text, prefix_block=16)
    assert ids(read(tmp_path, text, prefix_block=64)) == [[1, 2]]


def test_recordings_are_exact_and_may_hash_full_blocks_only(tmp_path: Path) -> None:
    """ns as written, hashes as ids, the block size as the rows say, priorities kept."""
    hashes = ',"prefix_hashes":["a3f0","77"],"prefix_block":16,"priority":-2'
    text = (
        RECORDED % ("1777142838.338653124", hashes)
        + RECORDED % ("1777142838.338653123", "")
        + RECORDED % ("1777142839", hashes)
    )
    trace = read(tmp_path, text)
    assert trace.arrival_ns.tolist() == [0, 1, 661_346_877]
    assert (trace.prefix_block, trace.priority.tolist()) == (16, [0, -2, -2])
    nothing, some, again = ids(trace)
    assert (nothing, len(some), some) == ([], 2, again)
    with pytest.raises(BadInput, match="line 2: prefix_block differs"):
        read(tmp_path, RECORDED % ("1", hashes) + RECORDED % ("1", ',"prefix_hashes":["1"],"prefix_block":32'))
    with pytest.raises(BadInput, match="line 2: schema"):
        read(tmp_path, RECORDED % ("1", "") + (RECORDED % ("1", "")).replace("/1", "/2"))


def test_a_recording_with_stamps_is_a_measured_run(tmp_path: Path) -> None:
    """Stamps have the trace's order and zero; what is absent is -1; cached tokens come along."""
    path = tmp_path / "r.jsonl"
    stamped = ',"scheduled":12.25,"first_token":12.5,"finished":13,"cached_tokens":16'
    path.write_text(RECORDED % ("12", stamped) + RECORDED % ("11.5", ""), encoding="utf-8")
    run = read_measured(str(path))
    assert run.trace.arrival_ns.tolist() == [0, 500_000_000]
    stamps = (run.scheduled_ns, run.first_token_ns, run.finish_ns, run.cached_tokens)
    assert [column.tolist() for column in stamps] == [[-1, 750_000_000], [-1, 1_000_000_000], [-1, 1_500_000_000], [-1, 16]]
    for stamps_of_one, says in ((',"scheduled":11.9', "line 1: scheduled lies before"), ("", "not a measured run")):
        path.write_text(RECORDED % ("12", stamps_of_one), encoding="utf-8")
        with pytest.raises(BadInput, match=says):
            read_measured(str(path))


@needs_data
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_measured_runs_are_read_whole(path: Path) -> None:
    """300 requests with all stamps in order, on the engine's clock, and a row a second beside them."""
    series = str(path).replace("_requests.jsonl", "_timeseries.csv")
    run = read_measured(str(path), timeseries=series)
    assert run.trace.size == 300
    assert run.trace.arrival_ns[0] == 0
    assert np.all(run.trace.arrival_ns <= run.scheduled_ns)
    assert np.all(run.scheduled_ns <= run.first_token_ns)
    assert np.all(run.first_token_ns <= run.finish_ns)
    assert run.series is not None
    assert len(run.series.at_s) == pytest.approx(run.finish_ns.max() / 1e9, abs=3)
    assert 0 <= run.series.kv_used_ratio.max() <= 1
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line, parse_float=Decimal) for line in lines]
    rows.sort(key=lambda row: row["queued_ts"])
    zero = rows[0]["queued_ts"]
    assert run.trace.arrival_ns.tolist() == [int((row["queued_ts"] - zero) * 10**9) for row in rows]
    assert run.finish_ns.tolist() == [int((row["last_token_ts"] - zero) * 10**9) for row in rows]
    assert run.trace.prompt.tolist() == [row["input_toks"] for row in rows]


def test_packed_plain_and_piped_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gzip by its first bytes, "-" for standard input, Windows line ends, a byte-order mark, blank lines."""
    text = AZURE + "2023-11-16 18:15:46.5,10,2\n2023-11-16 18:15:47.5,20,3\n"
    plain = read(tmp_path, text)
    odd = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n  \r\n"
    for content in (gzip.compress(text.encode()), odd, text.rstrip("\n").encode()):
        (tmp_path / "t").write_bytes(content)
        trace = read_trace(str(tmp_path / "t"))
        assert (trace.arrival_ns.tolist(), trace.prompt.tolist()) == (plain.arrival_ns.tolist(), plain.prompt.tolist())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_trace("-").output.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Timestamp,Model,Request tokens,Response tokens\n5,A,472,18\n9,A,10,0\n45,B,1087,230\n", [(472, 18), (1087, 230)]),
        ("arrived_at,input_tokens,output_tokens\n0,12,3\n1,5.0,0\n", [(12, 3), (5, 1)]),
        ('\ufeff"TimeStamp","contexttokens","GENERATEDTOKENS"\r\n"2023-11-16 18:15:46","374","44"\r\n', [(374, 44)]),
        ('{"schema": "plimsoll.request/1", "arrival": 0.5, "prompt_tokens": 7, "output_tokens": 9}\n', [(7, 9)]),
    ],
    ids=["BurstGPT with a failed request", "lengths", "other case, quotes and Windows' line ends", "our recording"],
)
def test_a_file_that_simulate_takes_gives_the_same_lengths(tmp_path: Path, text: str, pairs: list[tuple[int, int]]) -> None:
    """The columns go by the same names for `plan --workload` as for `simulate`, and a failed request is none for both."""
    (tmp_path / "t").write_text(text, encoding="utf-8")
    trace = read_trace(str(tmp_path / "t"))
    assert read_lengths(str(tmp_path / "t")) == pairs
    assert list(zip(trace.prompt.tolist(), trace.output.tolist(), strict=True)) == pairs
