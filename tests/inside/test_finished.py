"""From vLLM's figures to a line of a recording: what was measured, in order, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.recorder import ON_REQUEST, Finished, Seen, as_row, from_state, from_stats
from plimsoll.simulate.trace_files import SHAPES, json_columns, read_trace
from tests.inside.vllm_shapes import RequestState, finished, request, request_stats

AT = 1_700_000_000.0
ANY = st.floats() | st.floats(-10, 10)


def row(one: Finished | None) -> dict[str, object]:
    """The line, of something that there is."""
    assert one is not None
    return as_row(one)


def test_a_finished_request_has_its_times_on_the_wall_clock() -> None:
    """All is counted back from when its last output came."""
    assert row(from_stats(finished(), AT, 3)) == {
        "schema": "plimsoll.request/1",
        "arrival": AT - 2.0,
        "prompt_tokens": 100,
        "output_tokens": 20,
        "finish_reason": "length",
        "cached_tokens": 64,
        "preemptions": 1,
        "max_tokens": 20,
        "engine": 3,
        "scheduled": AT - 1.5,
        "first_token": AT - 1.0,
        "finished": AT,
    }


def test_a_lag_of_the_api_server_does_not_come_before_the_first_token() -> None:
    """First token and end are when the API server had them: the engine took 1.5 s, all of it was there after 2 s, and the
    first token after 0.6 s."""
    said = row(from_stats(finished(**{ON_REQUEST: Seen(None, None, "", (), first_token_s=0.6)}), AT, 0))
    assert (said["first_token"], said["finished"]) == (AT - 1.4, AT)
    assert said["scheduled"] == pytest.approx(AT - 1.9)


def test_what_was_not_measured_is_left_out() -> None:
    """Cached tokens before 0.13, preemptions before 0.30, all but the two ends of a request that was never scheduled."""
    old = finished(max_tokens_param=None)
    del old.num_cached_tokens, old.num_preemptions
    assert not {"cached_tokens", "preemptions", "max_tokens", "priority"} & set(row(from_stats(old, AT, 0)))
    never = finished(finish_reason="abort", num_generation_tokens=0, inference_time=300_000.0, decode_time=0.0)
    said = row(from_stats(never, AT, 0))
    assert not {"scheduled", "first_token", "cached_tokens"} & set(said)
    assert (said["arrival"], said["finished"]) == (AT - 2.0, AT)


def test_a_request_given_up_in_its_middle_says_what_was_measured_until_then() -> None:
    """The first token on the API server's clock; when it was scheduled by the difference on the engine's."""
    state = RequestState(request("a", [1] * 30))
    said = row(from_state(state, AT + 3.0))
    assert (said["arrival"], said["first_token"], said["finished"]) == (AT, AT + 1.0, AT + 3.0)
    assert said["scheduled"] == pytest.approx(AT + 0.6)
    assert (said["prompt_tokens"], said["output_tokens"], said["finish_reason"]) == (30, 9, "abort")


def test_a_request_given_up_while_it_waited_has_only_its_ends() -> None:
    """What vLLM holds as 0 was not measured; of one whose arrival is not known there is no line."""
    state = RequestState(request("a", [1] * 30))
    state.stats = request_stats(num_generation_tokens=0, scheduled_ts=0.0, first_token_ts=0.0, first_token_latency=0.0)
    assert set(row(from_state(state, AT + 3.0))) == {
        "schema", "arrival", "prompt_tokens", "output_tokens", "finish_reason", "max_tokens", "finished",
    }  # fmt: skip
    state = RequestState(request("a", [1]))
    state.stats = None
    assert from_state(state, AT) is None


@pytest.mark.parametrize(("reason", "is_cut_off"), [("stop", False), ("length", False), ("abort", True), ("error", True)])
def test_only_what_came_to_its_own_end_tells_how_long_outputs_are(reason: str, is_cut_off: bool) -> None:
    """An aborted output could have been longer."""
    assert from_stats(finished(finish_reason=reason), AT, 0).is_cut_off is is_cut_off


@given(ANY, ANY, ANY, st.integers(-5, 2**40) | st.none(), st.integers(-5, 2**40), ANY | st.none())
def test_any_figures_make_a_line_that_the_reader_accepts_or_none(
    e2e: float, inference: float, decode: float, prompt: int | None, output: int, first: float | None
) -> None:
    """Times that contradict each other are moved or left out, never written out of order."""
    stats = finished(
        e2e_latency=e2e,
        inference_time=inference,
        decode_time=decode,
        num_prompt_tokens=prompt,
        num_generation_tokens=output,
        **{ON_REQUEST: Seen(None, None, "", (), first)},
    )
    try:
        line = json.dumps(as_row(from_stats(stats, AT, 0)), allow_nan=False)
    except ValueError:
        assert not e2e < 1e9
        return
    json_columns(SHAPES[0], [line], 0)


def test_the_reader_of_traces_takes_the_line(tmp_path: Path) -> None:
    """Written by one part, read by another, of the same format."""
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row(from_stats(finished(), AT, 0))) + "\n")
    trace = read_trace(str(path))
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([100], [20])
