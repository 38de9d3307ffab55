"""The wrapped methods do as before, tell what stat loggers are not told, and stay away from what they do not know."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import Pulse, watch_requests, what_is_seen
from plimsoll.inside.recorder import ON_REQUEST, Recorder
from plimsoll.inside.settings import InsideSettings
from tests.inside.vllm_shapes import iteration, output_processor, request


def recorder(folder: Path) -> Recorder:
    """One that records with hashes."""
    return Recorder(
        InsideSettings({"PLIMSOLL_RECORD": str(folder), "PLIMSOLL_RECORD_PREFIXES": "1", "PLIMSOLL_RECORD_SALT": "s"})
    )


def lines(one: Recorder, folder: Path) -> list[dict[str, Any]]:
    """What it wrote, once it is over."""
    one.close(limit_s=10)
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def test_without_a_recording_nothing_is_wrapped() -> None:
    """vLLM's class is left exactly as it is."""
    kind = output_processor()
    before = dict(vars(kind))
    assert watch_requests(Recorder(InsideSettings({})), Pulse(), kind) is False
    assert dict(vars(kind)) == before


def test_a_finished_request_carries_what_was_seen_when_it_came(tmp_path: Path) -> None:
    """Its priority, its tokens and when its first token was there go along with vLLM's figures; all else is as before."""
    kind = output_processor()
    assert watch_requests(recorder(tmp_path), Pulse(), kind)
    processor = kind()
    assert processor.add_request(request("a", [1] * 20, priority=5), None) == "added"
    stats = iteration()
    processor._update_stats_from_finished(processor.request_states["a"], "stop", stats)
    (one,) = stats.finished_requests
    seen = getattr(one, ON_REQUEST)
    assert (seen.priority, seen.token_ids, seen.first_token_s) == (5, [1] * 20, 1.0)
    assert processor.request_states == {}


def test_given_up_requests_are_recorded_each_once(tmp_path: Path) -> None:
    """Also the children of a parent, which vLLM aborts by calling itself; one that is unknown is not."""
    kind, one, pulse = output_processor(), recorder(tmp_path), Pulse()
    watch_requests(one, pulse, kind)
    processor = kind()
    for name in "abcd":
        processor.add_request(request(name, [1] * 32), None)
    processor.parent_requests["parent"] = ["c", "d"]
    assert processor.abort_requests(iter(["a", "parent", "nobody"]), internal=True) == ["a", "c", "d"]
    assert set(processor.request_states) == {"b"}
    found = lines(one, tmp_path)
    assert [line["finish_reason"] for line in found] == ["abort"] * 3
    assert [len(line["prefix_hashes"]) for line in found] == [2] * 3
    assert (pulse.finished, pulse.mean_output()) == (3, None)


def test_wrapping_twice_is_wrapping_once(tmp_path: Path) -> None:
    """vLLM builds its loggers anew when engines are added, and each build comes by here."""
    kind, one = output_processor(), recorder(tmp_path)
    assert watch_requests(one, Pulse(), kind)
    assert watch_requests(one, Pulse(), kind)
    processor = kind()
    processor.add_request(request("a", [1] * 32), None)
    processor.abort_requests(["a"], True)
    assert len(lines(one, tmp_path)) == 1


@pytest.mark.parametrize("name", ["add_request", "_update_stats_from_finished", "abort_requests"])
def test_a_method_that_looks_otherwise_is_left_alone_with_all_others(name: str, tmp_path: Path) -> None:
    """All three or none; it is counted."""

    def other(self: Any, something: Any) -> None:
        del self, something

    kind = output_processor()
    setattr(kind, name, other)
    before, counted = dict(vars(kind)), FAULTS.counts.get("watching requests", 0)
    assert watch_requests(recorder(tmp_path), Pulse(), kind) is False
    assert dict(vars(kind)) == before
    assert FAULTS.counts["watching requests"] == counted + 1


def test_where_there_is_no_vllm_nothing_is_wrapped(tmp_path: Path) -> None:
    """An import that fails is counted, not raised."""
    assert watch_requests(recorder(tmp_path), Pulse()) is False


def test_an_error_of_vllm_is_vllms_own_and_one_of_ours_is_not_seen(tmp_path: Path) -> None:
    """What vLLM raises comes through; what we stumble over does not, and later aborts are still told."""
    kind, one = output_processor(), recorder(tmp_path)
    watch_requests(one, Pulse(), kind)
    processor = kind()
    with pytest.raises(TypeError):
        processor.abort_requests(7, internal=True)
    processor.add_request(request("a", [1] * 16), None)
    processor.request_states["a"].stats = SimpleNamespace()  # nothing that we look for is in it
    assert processor.abort_requests(["a"], internal=True) == ["a"]
    processor.add_request(request("b", [1] * 16), None)
    assert processor.abort_requests(["b"], internal=True) == ["b"]
    assert len(lines(one, tmp_path)) == 1


def test_what_the_prefix_cache_tells_apart_is_told_apart() -> None:
    """The adapter, the cache salt, and pictures by where they stand, in the fields of old and new releases."""
    plain = what_is_seen(request("a", [1]), wants_prefixes=True)
    adapted = what_is_seen(request("a", [1], lora_request=SimpleNamespace(lora_name="x")), wants_prefixes=True)
    salted = what_is_seen(request("a", [1], cache_salt="y"), wants_prefixes=True)
    assert len({plain.seed, adapted.seed, salted.seed}) == 3
    place = SimpleNamespace(offset=20)
    new = request("a", [1], mm_features=[SimpleNamespace(identifier="cat", mm_position=place)])
    old = request("a", [1], mm_inputs=["?"], mm_hashes=["cat"], mm_placeholders=[place])
    assert what_is_seen(new, wants_prefixes=True).marks == what_is_seen(old, wants_prefixes=True).marks == ((20, "cat"),)


@pytest.mark.parametrize("more", [{"prompt_embeds": "a tensor"}, {"mm_inputs": ["?"], "mm_hashes": None}])
def test_a_prompt_that_its_tokens_do_not_tell_has_no_hashes(more: dict[str, Any]) -> None:
    """Embeddings in place of tokens, and pictures that vLLM did not hash."""
    assert what_is_seen(request("a", [1] * 32, **more), wants_prefixes=True).token_ids is None


def test_a_release_that_says_more_of_a_finished_request_is_not_stopped(tmp_path: Path) -> None:
    """An argument that is new to us reaches vLLM's own method; an error here would end the engine for everybody."""
    heard: list[Any] = []

    class Newer(output_processor()):  # type: ignore[misc]  # the fake's class is made by a function
        """As the next release may look."""

        def _update_stats_from_finished(
            self, req_state: Any, finish_reason: Any, iteration_stats: Any, model: str, *, at: float = 0.0
        ) -> None:
            heard.extend((req_state, finish_reason, iteration_stats, model, at))

    assert watch_requests(recorder(tmp_path), Pulse(), Newer)
    Newer()._update_stats_from_finished("state", "stop", iteration_stats=None, model="m", at=2.0)
    assert heard == ["state", "stop", None, "m", 2.0]
