"""The door's verdicts and accounts, on pages that several API servers share, and what the gate makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import Receive, Scope, Send
from plimsoll.inside.door import (
    DOOR,
    HOMES,
    LARGEST_FILE,
    PASSAGE,
    UNITS,
    BadTable,
    CertificateTable,
    Door,
    Refusal,
    RequestKind,
    read_certificate,
    why_foreign,
)
from plimsoll.inside.shared import Shared
from tests.each import each, rows, sure
from tests.fakes import Wire, ask
from tests.inside.test_gate_control import Around, made

CASES = Path(__file__).parent / "cases.txt"
PROMPT = RequestKind("prompt_logprobs", "prompt tokens", 0, 1, 100, "step", is_open=True)
KINDS = {
    "prompt_logprobs": PROMPT,
    "pictures": RequestKind("pictures", "encoder tokens", 5, 1, 100, "step", is_open=True),
    "logprobs": RequestKind("logprobs", "log-probabilities", 10, 5, 20, "step", is_open=True),
    "penalties": RequestKind("penalties", "sequences", 0, 1, 64, "step", is_open=True),
    "adapter": RequestKind("adapter", "adapters", 0, 60, 1, "process", is_open=True),
}


def door(spare: float = 50, mode: str = "certified") -> Door:
    made = Door()
    made.use(mode, CertificateTable("0.32.0", "m", spare, {}, tuple(KINDS.values())), KINDS)
    return made


def tokens(count: int, kind: str = "prompt_logprobs") -> dict[str, int]:
    return {kind: count}


def why(refusal: Refusal | None) -> str:
    return "" if refusal is None else refusal.why


# Verdicts and accounts
def test_what_exceeds_the_spare_memory_alone_is_never_let_in_and_beside_others_not_now() -> None:
    """By the table's formula; what has left makes room again, once."""
    one = door()
    assert why(one.admit("a", "a", tokens(51))) == "never"
    assert why(one.admit("b", "b", tokens(30))) == ""
    assert why(one.admit("c", "c", tokens(21))) == "not_now"
    assert why(one.admit("d", "d", tokens(20))) == ""
    assert one.words()["admitted_bytes"] == 50
    for _ in range(3):
        one.leave("b")
    assert one.words()["admitted_bytes"] == 20
    assert why(one.admit("c", "c", tokens(30))) == ""
    assert one.words()["refused"] == {"never": {"prompt_logprobs": 1}, "not_now": {"prompt_logprobs": 1}}


def test_kinds_are_phases_of_a_step() -> None:
    """A step holds no more than its most units, and each kind has all that is spare: the encoder's memory is free by then."""
    one = door(spare=100)
    assert all(one.admit(str(name), str(name), tokens(90)) is None for name in range(50))
    assert one.words()["admitted_bytes"] == 100
    one = door()
    assert one.admit("a", "a", tokens(50)) is None
    assert one.admit("b", "b", tokens(45, "pictures")) is None  # with the fixed 5
    assert why(one.admit("c", "c", tokens(1, "pictures"))) == "not_now"
    assert why(one.admit("d", "d", tokens(9, "logprobs"))) == "never"
    assert all(one.admit(name, name, tokens(8, "logprobs")) is None for name in "efgh")
    assert why(one.admit("i", "i", tokens(1, "adapter"))) == "never"


def test_copies_are_held_at_once_and_given_back_when_the_last_has_ended() -> None:
    """Also where one ends before another has come, or where the rest never comes."""
    one = door()
    assert one.admit("0_p", "p", tokens(45), copies=3) is None
    one.join_copy("1_p", "p")
    one.leave("0_p")
    one.leave("1_p")
    assert one.words()["admitted_bytes"] == 45, "the third is still to come"
    one.join_copy("2_p", "p")
    one.leave("2_p")
    assert one.words()["admitted_bytes"] == 0
    assert one.admit("0_q", "q", tokens(45), copies=3) is None
    one.leave("0_q")
    one.end_whole("q")
    assert one.words()["admitted_bytes"] == 0


def test_what_is_held_for_requests_that_vllm_no_longer_has_is_given_back_before_anyone_is_refused() -> None:
    """A way out of vLLM that is not known here must not close the door for ever."""
    one = door()
    running = {"a", "b"}
    one.is_running = lambda name: name in running
    assert one.admit("a", "a", tokens(25)) is None
    assert one.admit("b", "b", tokens(25)) is None
    running.discard("a")
    assert one.admit("c", "c", tokens(25)) is None
    running.add("c")
    assert why(one.admit("d", "d", tokens(25))) == "not_now"
    one.leave("a")
    assert one.words()["admitted_bytes"] == 50


def test_a_shadow_counts_and_holds_only_what_it_would_have_let_in() -> None:
    """So that its counts are those of a door that refuses."""
    one = door(mode="shadow")
    assert not one.refuses
    one.admit("a", "a", tokens(51))
    one.admit("b", "b", tokens(40))
    one.admit("c", "c", tokens(40))
    found = one.words()
    assert (found["admitted_bytes"], found["refused"]) == (40, {"never": {}, "not_now": {}})
    assert found["would_refuse"] == {"never": {"prompt_logprobs": 1}, "not_now": {"prompt_logprobs": 1}}


def test_several_api_servers_share_one_account(tmp_path: Path) -> None:
    """What one has let in counts for the other, and each tells the counts of both."""
    doors, pages = [door(), door()], []
    for number, one in enumerate(doors):  # one process stands for both: each has a folder of its own
        (tmp_path / str(number)).mkdir()
        pages.append(Shared(str(tmp_path / str(number)), 1, fellows_expected=True))
        one.join(pages[-1])
    for number, shared in enumerate(pages):
        shared._fellows = {"other": pages[1 - number].own}
    assert doors[0].admit("a", "a", tokens(30)) is None
    assert why(doors[1].admit("b", "b", tokens(30))) == "not_now"
    assert why(doors[1].admit("c", "c", tokens(51))) == "never"
    assert doors[1].admit("d", "d", tokens(20)) is None
    for one in doors:
        assert one.words()["admitted_bytes"] == 50
        assert one.words()["refused"] == {"never": {"prompt_logprobs": 1}, "not_now": {"prompt_logprobs": 1}}
    doors[0].leave("a")
    assert doors[1].admit("e", "e", tokens(30)) is None
    for shared in pages:
        shared._fellows = {}
        shared.close()
    assert doors[0].admit("f", "f", tokens(50)) is None, "its page is closed; it goes on alone"


@given(
    st.lists(
        st.tuples(st.sampled_from("admit copy leave end undo".split()), st.integers(0, 5), st.integers(1, 60)), max_size=60
    )
)
def test_whatever_comes_and_goes_no_account_is_negative_and_all_come_back(events: list[tuple[str, int, int]]) -> None:
    """In any order, twice, or never announced."""
    one = door()
    for does, number, units in events:
        key = f"k{number}"
        if does == "admit":
            one.admit(f"0_{key}", key, tokens(units), copies=1 + units % 3)
        elif does == "copy":
            one.join_copy(f"1_{key}", key)
        elif does == "leave":
            one.leave(f"{units % 3}_{key}")
        elif does == "end":
            one.end_whole(key)
        else:
            one.undo(f"0_{key}", key)
        assert 0 <= one.words()["admitted_bytes"] <= 50
    for number in range(6):
        for copy in range(3):
            one.leave(f"{copy}_k{number}")
        one.end_whole(f"k{number}")
    assert one.words()["admitted_bytes"] == 0
    assert not one._holds


# Told to the client
@pytest.fixture
def closed() -> Iterator[None]:
    """The process's own door refuses what it must."""
    DOOR.use("certified", CertificateTable("0.32.0", "m", 50, {}, tuple(KINDS.values())), KINDS)
    yield
    DOOR.stay_open("off", "")


def stream(refusal: Refusal | None, *, first: bytes = b"", kind: bytes = b"text/event-stream; charset=utf-8") -> Any:
    """An app that answers as vLLM's streams do: 200 at once, then what the engine says, a refusal as an event."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", kind)]})
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        sure(PASSAGE.get()).refusal = refusal
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    return app


@pytest.mark.usefixtures("closed")
def test_a_stream_that_the_door_refuses_is_answered_with_a_status_not_with_an_event(tmp_path: Path) -> None:
    """vLLM begins a stream with 200 before it adds the request; balancers and clients go by the status."""
    core, _ = made(tmp_path)
    for refusal, status in ((Refusal("never", "logprobs", "too many"), 400), (Refusal("not_now", "pictures", "full"), 503)):
        told = asyncio.run(ask(Around(stream(refusal), core), "POST", "/v1/completions"))
        assert told.status == status
        assert told.json()["error"]["message"] == refusal.message
        assert told.json()["error"]["code"] == status
        assert ("retry-after" in told.headers) == (status == 503)
    assert (core.in_layer, core.answering) == (0, 0)


@pytest.mark.usefixtures("closed")
def test_any_other_stream_passes_as_it_is(tmp_path: Path) -> None:
    """One that is let in, one that had begun before a later part of it was refused, and what is no stream."""
    core, _ = made(tmp_path)
    refusal = Refusal("never", "logprobs", "too many")
    for app, body in (
        (stream(None), b"data: {}\n\ndata: [DONE]\n\n"),
        (stream(refusal, first=b"data: 1\n\n"), b"data: 1\n\ndata: {}\n\ndata: [DONE]\n\n"),
        (stream(refusal, kind=b"application/json"), b"data: {}\n\ndata: [DONE]\n\n"),
    ):
        told = asyncio.run(ask(Around(app, core), "POST", "/v1/completions"))
        assert (told.status, told.body) == (200, body)


def test_with_the_door_off_no_stream_is_held_back(tmp_path: Path) -> None:
    """Its start goes out before its first part is there."""
    core, _ = made(tmp_path)
    wire, held = Wire({"type": "http.request", "body": b""}), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        held.append(len(wire.sent))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Around(app, core)(scope, wire.receive, wire.send))
    assert held == [1]


# The certificate's table: read within limits, refused in one sentence, and held against the engine that runs.

ROW: dict[str, Any] = {
    "kind": "prompt_logprobs", "unit": "prompt tokens", "fixed_bytes": 10, "bytes_per_unit": 2.5, "most_units": 100,
    "scope": "step", "smallest": 37, "closes": "--max-num-batched-tokens 1024", "source": "v1/worker/gpu_model_runner.py",
}  # fmt: skip
TABLE: dict[str, Any] = {
    "schema": "plimsoll.certificate/1", "vllm": "0.32.0", "model": "org/Model-8B", "gpu": "H200",
    "made": "2026-01-01T00:00:00Z", "certified": False, "spare_bytes": 100, "kinds": [ROW],
    "assumes": {"free_bytes_at_start": 1, "pieces_bytes": 2, "max_num_batched_tokens": 2048, "max_num_seqs": 64},
}  # fmt: skip


def written(folder: Path, table: Any) -> str:
    path = folder / "table.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def config(**changed: Any) -> SimpleNamespace:
    """`VllmConfig` of the engine that the table was made for."""
    values = {"model": "org/Model-8B", "max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096, "v2": True}
    values |= changed
    scheduler = SimpleNamespace(**{name: values[name] for name in ("max_num_batched_tokens", "max_num_seqs")})
    model = SimpleNamespace(model=values["model"], max_model_len=values["max_model_len"])
    return SimpleNamespace(
        model_config=model, scheduler_config=scheduler, cache_config=SimpleNamespace(), use_v2_model_runner=values["v2"]
    )


def test_a_table_is_read_and_its_costs_follow_the_formula(tmp_path: Path) -> None:
    """Fixed bytes and bytes for each unit up to the most of a step; a smallest request of null is a closed kind."""
    table = read_certificate(written(tmp_path, TABLE))
    (kind,) = table.kinds
    assert (table.vllm, table.model, table.spare_bytes, kind.kind, kind.is_open) == (
        "0.32.0", "org/Model-8B", 100.0, "prompt_logprobs", True,
    )  # fmt: skip
    assert [kind.cost(units) for units in (0, 1, 100, 10_000)] == [0.0, 12.5, 260.0, 260.0]
    assert not read_certificate(written(tmp_path, TABLE | {"kinds": [ROW | {"smallest": None}]})).kinds[0].is_open


@each(
    ("changed", "says"),
    [*rows(CASES, "no tables"), (json.dumps({"kinds": [ROW] * 65}), "kinds"), (json.dumps({"kinds": [ROW, ROW]}), "twice")],
)
def test_what_is_no_table_says_why(tmp_path: Path, changed: str, says: str) -> None:
    """One sentence with the file and what is wrong in it."""
    news = json.loads(changed)
    path = written(tmp_path, TABLE | ({"kinds": [ROW | news["row"]]} if "row" in news else news))
    with pytest.raises(BadTable, match=says) as told:
        read_certificate(path)
    assert str(told.value).startswith(path)


def test_files_that_cannot_be_tables_are_refused_without_reading_on(tmp_path: Path) -> None:
    """None at all, a folder, a pipe that nobody writes to, too much, not JSON, nested without end."""
    pipe, large, text, deep = (tmp_path / name for name in ("pipe", "large", "text", "deep"))
    os.mkfifo(pipe)
    large.write_bytes(b" " * (LARGEST_FILE + 1))
    text.write_bytes(b"\xff\xfe{")
    deep.write_text("[" * 200_000)
    for path in ("", str(tmp_path / "none"), str(tmp_path), *map(str, (pipe, large, text, deep))):
        with pytest.raises(BadTable):
            read_certificate(path)


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda part: st.lists(part, max_size=3))
)
def test_no_value_anywhere_makes_it_raise_anything_else(value: Any) -> None:
    """Whatever stands in a field, it is a table or a BadTable."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in TABLE:
            _read(Path(folder), TABLE | {name: value})
        for name in ROW:
            _read(Path(folder), TABLE | {"kinds": [ROW | {name: value}]})


def _read(folder: Path, table: Any) -> None:
    try:
        path = written(folder, table)
    except UnicodeEncodeError:
        return
    try:
        found = read_certificate(path)
    except BadTable:
        return
    assert isinstance(found, CertificateTable)
    assert all(isinstance(kind, RequestKind) and kind.cost(1e9) >= 0 for kind in found.kinds)


def test_a_table_for_this_engine_is_no_foreigner(tmp_path: Path) -> None:
    """Builds of the same release, the model by its name, its folder or its place in the cache."""
    table = read_certificate(written(tmp_path, TABLE))
    for version in ("0.32.0", "0.32.0+cpu", "0.32.0+cu130"):
        assert why_foreign(table, version, config()) == ""
    for model in ("org/Model-8B/", "/models/Model-8B", "/cache/hub/models--org--Model-8B/snapshots/abc"):
        assert why_foreign(table, "0.32.0", config(model=model)) == ""
    fetched = config(model="/tmp/fetched-1234")
    fetched.model_config.model_weights = "org/Model-8B"
    assert why_foreign(table, "0.32.0", fetched) == ""


def test_a_table_for_another_engine_says_what_differs(tmp_path: Path) -> None:
    """Another release, another model, another batch or context, a config without them."""
    more = {"max_model_len": 4096, "v2_model_runner": True}
    table = read_certificate(written(tmp_path, TABLE | {"assumes": {**TABLE["assumes"], **more}}))
    assert why_foreign(table, "0.32.0", config()) == ""
    assert "v2_model_runner True, and here it is False" in why_foreign(table, "0.32.0", config(v2=False))
    assert "vLLM 0.32.0, and this is 0.31.0" in why_foreign(table, "0.31.0", config())
    assert "vLLM 0.32.0, and this is 0.32.1rc1" in why_foreign(table, "0.32.1rc1", config())
    assert "the model org/Model-8B, and this is org/Model-70B" in why_foreign(table, "0.32.0", config(model="org/Model-70B"))
    assert "max_num_batched_tokens 2048, and here it is 8192" in why_foreign(
        table, "0.32.0", config(max_num_batched_tokens=8192)
    )
    assert "max_num_seqs" in why_foreign(table, "0.32.0", config(max_num_seqs=128))
    assert "max_model_len" in why_foreign(table, "0.32.0", config(max_model_len=8192))
    assert why_foreign(table, "0.32.0", SimpleNamespace()) != ""


def test_the_door_reads_what_plan_writes(tmp_path: Path) -> None:
    """Every kind, unit and assumption of a real certificate is understood; its open kind is one that the door can judge."""
    path = tmp_path / "table.json"
    own = ["--certify", "--table", str(path), "--gpu", "H200", "--vllm", "0.25.1", "--"]
    command = [
        "env", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len",
        "8192",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "plan", *own, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    table = read_certificate(str(path))
    (open_kind,) = (kind for kind in table.kinds if kind.is_open)
    assert (open_kind.kind, UNITS[open_kind.kind]) == ("prompt_logprobs", open_kind.unit)
    smallest = next(row["smallest"] for row in json.loads(path.read_text())["kinds"] if row["kind"] == "prompt_logprobs")
    assert open_kind.cost(smallest - 1) <= table.spare_bytes < open_kind.cost(smallest)
    assert set(table.assumes) & set(HOMES) >= {"max_num_batched_tokens", "max_num_seqs", "max_model_len", "v2_model_runner"}
    assert {kind.unit for kind in table.kinds if kind.kind in UNITS} <= set(UNITS.values())
