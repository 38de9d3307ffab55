"""The pulse: what is learned from the engine's steps, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import STEP_LIMIT_S, STEP_MEMORY_S, Listener, Pulse, watch_requests, what_is_seen
from plimsoll.inside.recorder import ON_REQUEST, Recorder
from plimsoll.inside.settings import InsideSettings
from tests.inside.test_recorder import recorder as recording
from tests.inside.test_recorder import rows
from tests.inside.vllm_shapes import finished, iteration, output_processor, request, scheduler


def busy(pulse: Pulse, begin: float, steps: int, each_s: float = 0.1, tokens: int = 50, waiting: int = 2) -> float:
    for step in range(steps):
        pulse.note_step(4, waiting, 0.5, 0, tokens, begin + step * each_s)
    end = begin + steps * each_s
    pulse.note_step(0, 0, 0.0, 0, tokens, end)
    return end


def test_idle_time_does_not_change_the_rate() -> None:
    """Neither an hour of nothing nor a large prefill after it, whose beginning is unknown."""
    pulse = Pulse()
    end = busy(pulse, 100.0, 30)
    assert pulse.full_tokens_per_s(end) == pytest.approx(500, rel=0.01)
    busy(pulse, end + 3600, 30)
    assert pulse.full_tokens_per_s(end + 7200) == pytest.approx(500, rel=0.01)
    pulse = Pulse()
    at = 0.0
    for _ in range(20):
        at += 60
        pulse.note_step(4, 2, 0.5, 100_000, 0, at)
        at = busy(pulse, at + 0.1, 5)
    assert pulse.full_tokens_per_s(at) == pytest.approx(500, rel=0.05)


def test_the_rate_needs_a_second_of_work_and_follows_the_engine() -> None:
    """A handful of steps is no basis to refuse anybody; after a minute at a fifth of the speed the old one is forgotten."""
    pulse = Pulse()
    assert pulse.full_tokens_per_s(busy(pulse, 0.0, 9)) is None
    assert pulse.full_tokens_per_s(busy(pulse, 5.0, 9)) is not None
    pulse = Pulse()
    end = busy(pulse, 0.0, 300)
    end = busy(pulse, end + 1, 600, tokens=10)
    assert pulse.full_tokens_per_s(end) == pytest.approx(100, rel=0.25)


def test_a_stuck_engine_gets_slower_by_the_second() -> None:
    """While work is there and no step comes, the time counts, up to a bound."""
    pulse = Pulse()
    for step in range(20):
        pulse.note_step(4, 2, 0.5, 0, 50, step * 0.1)
    at_once, later, much_later = (pulse.full_tokens_per_s(1.9 + gap) for gap in (0.0, 5.0, 10_000.0))
    assert at_once is not None
    assert later is not None
    assert much_later is not None
    assert at_once > later > much_later > 0


def test_the_rate_of_a_full_engine_is_learned_only_while_requests_wait() -> None:
    """One lone request shows how fast one is served, not what the engine can do."""
    pulse = Pulse()
    end = busy(pulse, 0.0, 50, tokens=5, waiting=0)
    assert pulse.full_tokens_per_s(end) is None
    end = busy(pulse, end + 1, 50, tokens=500, waiting=3)
    assert pulse.full_tokens_per_s(end) == pytest.approx(5000, rel=0.05)
    busy(pulse, end + 1, 500, tokens=5, waiting=0)
    assert pulse.full_tokens_per_s(end + 60) == pytest.approx(5000, rel=0.05)


def test_the_longest_step_is_between_two_steps_with_work_and_is_not_believed_for_ever() -> None:
    """Neither idling nor sleep is one; a pause of a day counts as ten minutes, and is forgotten within an hour of steps."""
    pulse = Pulse()
    end = busy(pulse, 0.0, 10)
    end = busy(pulse, end + 500, 10, each_s=0.7)
    assert pulse.longest_step_s == pytest.approx(0.7)
    pulse.note_step(1, 0, 0.1, 0, 1, end + 1)
    for is_asleep, level in ((True, 2), (False, None)):
        pulse.note_sleep(is_asleep, 2)
        assert pulse.sleep_level == level
    pulse.note_step(1, 0, 0.1, 0, 1, end + 5000)
    assert pulse.longest_step_s == pytest.approx(0.7)
    at = end + 86_400
    pulse.note_step(1, 0, 0.1, 0, 1, at)
    assert pulse.longest_step_s == STEP_LIMIT_S
    for _ in range(int(2 * STEP_MEMORY_S / 5) + 2):
        at += 5
        pulse.note_step(1, 0, 0.1, 0, 1, at)
    assert pulse.longest_step_s == 5


def test_engines_are_summed_up_step_by_step() -> None:
    """Sums, and the fullest cache; the longest step is one engine's own; without the scheduler's figures the last ones stay."""
    pulse = Pulse()
    pulse.note_step(3, 1, 0.2, 0, 10, 1.0, engine=0)
    pulse.note_step(5, 0, 0.9, 0, 10, 1.1, engine=1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage) == (8, 1, 0.9)
    pulse.note_step(0, 0, 0.0, 0, 10, 1.2, engine=1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage) == (3, 1, 0.2)
    pulse = Pulse()
    pulse.note_step(1, 0, 0.1, 0, 1, 0.0, engine=0)
    for step in range(1, 40):
        pulse.note_step(1, 0, 0.1, 0, 1, step * 0.1, engine=1)
    pulse.note_step(1, 0, 0.1, 0, 1, 4.0, engine=0)
    assert pulse.longest_step_s == pytest.approx(4.0)
    pulse = Pulse()
    pulse.note_step(7, 2, 0.4, 0, 1, 0.0)
    pulse.note_step(None, None, None, 0, 1, 0.1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage, pulse.steps) == (7, 2, 0.4, 2)


def test_where_other_servers_hear_of_steps_too_a_long_gap_is_not_taken_for_work() -> None:
    """The last figures said that one runs, another server heard that it ended: neither a slow engine nor a long step."""
    pulse = Pulse()
    for begin in (0.0, 300.0, 9000.0):
        for step in range(15):
            is_told = bool(step % 2)
            pulse.note_step(1 if is_told else None, 2 if is_told else None, 0.1, 0, 50, begin + step * 0.1)
    assert pulse.is_partial
    alone = Pulse()
    for tokens in (5, 0):  # a step that brought no token, as after an abort, is no sign of other servers
        alone.note_step((tokens and 1) or None, None, None, tokens, tokens, 0.1)
    assert not alone.is_partial
    assert pulse.figures_at == pytest.approx(9001.3)
    assert pulse.full_tokens_per_s(9001.4) == pytest.approx(500, rel=0.05)
    assert pulse.longest_step_s == pytest.approx(0.1)


def test_means_forget_slowly_and_leave_out_what_was_cut_off() -> None:
    """The mean is exact while there are few; an aborted request says nothing about how long outputs are."""
    pulse = Pulse()
    for prompt, output in ((100, 10), (300, 30), (800, None)):
        pulse.note_finished(prompt, output)
    assert (pulse.prompt_tokens.value, pulse.output_tokens.value, pulse.finished) == (400, 20, 3)
    for _ in range(2000):
        pulse.note_finished(50, 5)
    assert pulse.prompt_tokens.value == pytest.approx(50, rel=0.01)
    assert pulse.output_tokens.value == pytest.approx(5, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 1000),
            st.integers(0, 1000),
            st.integers(0, 10**6),
            st.floats(-1e9, 1e9),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_no_order_of_steps_and_no_clock_breaks_it(steps: list[tuple[int | None, int, int, float, int]]) -> None:
    """A clock that jumps back or far ahead leaves figures that are possible, in a memory that does not grow."""
    pulse = Pulse()
    for running, waiting, tokens, now, engine in steps:
        pulse.note_step(running, waiting if running is not None else None, 0.5, tokens, 0, now, engine)
        rate = pulse.full_tokens_per_s(now)
        assert rate is None or rate >= 0
        assert 0 <= pulse.longest_step_s <= STEP_LIMIT_S
    assert len(pulse._engines) <= 4


# What vLLM tells at each step reaches the pulse and the recorder, in the words of every release.
def listener(engine: int = 0, record: Path | None = None) -> tuple[Listener, Pulse, Recorder]:
    pulse, recorder = Pulse(), Recorder(InsideSettings({"PLIMSOLL_RECORD": str(record)} if record else {}))
    one = Listener()
    one.listen(engine, pulse, recorder)
    return one, pulse, recorder


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {"scheduler_stats": scheduler(3, 1, gpu_cache_usage=0.25), "iteration_stats": iteration()}),  # 0.8, 0.9
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration(), 0), {}),  # 0.10, 0.11.0
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration()), {"mm_cache_stats": None, "engine_idx": 0}),  # 0.11.1 and later
        ((scheduler(3, 0, num_skipped_waiting_reqs=1, kv_cache_usage=0.25), None), {"engine_idx": 0}),  # 0.32.0
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration(), None, 0, "more"), {"and": "more"}),  # one to come
    ],
)
def test_every_release_is_understood(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Running, waiting with those put off, and the KV usage under both of its names."""
    one, pulse, _ = listener()
    one.record(*args, **named)
    assert (pulse.running, pulse.waiting, pulse.kv_usage, pulse.steps) == (3, 1, 0.25, 1)
    assert pulse.is_fed


def test_finished_requests_are_learned_from_and_recorded(tmp_path: Path) -> None:
    """Each with the engine that served it; an aborted one does not tell how long outputs are."""
    one, pulse, recorder = listener(record=tmp_path)
    cut = finished(finish_reason="abort", num_generation_tokens=900)
    one.record(scheduler(0, 0, kv_cache_usage=0.0), iteration(finished(), cut, prompt=200, generation=2), engine_idx=6)
    recorder.close(limit_s=10)
    assert (pulse.finished, pulse.prompt_tokens.value, pulse.output_tokens.value) == (2, 100, 20)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["finish_reason"], line["engine"]) for line in lines] == [("length", 6), ("abort", 6)]


@pytest.mark.parametrize("odd", ["a word", 7, object(), {"num_running_reqs": 1}])
def test_nothing_that_vllm_says_can_stop_it(odd: object) -> None:
    """An exception here would end vLLM's output handler and with it every request: it is counted instead."""
    one, pulse, _ = listener()
    before = FAULTS.counts.get("hearing a step", 0)
    one.record(odd, odd)
    one.record(odd)
    one.record()
    assert FAULTS.counts["hearing a step"] == before + 2
    assert pulse.steps == 0


def test_sleep_is_heard_and_the_rest_does_nothing() -> None:
    """vLLM's base class passes 1 for asleep, whatever it names it; a missing method would be an error in vLLM's own loop."""
    one, pulse, _ = listener()
    levels = []
    for args, named in (((1, 2), {}), ((0, 0), {}), ((), {"sleep": 1, "level": 1}), ((), {})):
        one.record_sleep_state(*args, **named)
        levels.append(pulse.sleep_level)
    assert levels == [2, None, 1, 1]
    one, pulse, _ = listener()
    one.log()
    one.log_engine_initialized()
    one.record_admission_rejection("max_num_queued_reqs")
    assert pulse.steps == 0


# The wrapped methods do as before, tell what stat loggers are not told, and stay away from what they do not know.
def recorder(folder: Path) -> Recorder:
    return recording(folder, PLIMSOLL_RECORD_PREFIXES="1", PLIMSOLL_RECORD_SALT="s")


def lines(one: Recorder, folder: Path) -> list[dict[str, Any]]:
    one.close(limit_s=10)
    return rows(folder)


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
    assert (pulse.finished, pulse.output_tokens.seen) == (3, 0)


def test_a_class_is_wrapped_once_all_of_it_and_only_where_it_is_recorded_and_known(tmp_path: Path) -> None:
    """vLLM builds its loggers anew when engines are added; one method that looks otherwise leaves all three alone, counted."""
    off, on = Recorder(InsideSettings({})), recorder(tmp_path)
    odd = [output_processor() for _ in range(3)]
    for kind, name in zip(odd, ("add_request", "_update_stats_from_finished", "abort_requests"), strict=True):
        setattr(kind, name, lambda _self, something: something)
    for watcher, kind in ((off, output_processor()), *((on, kind) for kind in odd)):
        before = dict(vars(kind))
        assert watch_requests(watcher, Pulse(), kind) is False
        assert dict(vars(kind)) == before
    assert watch_requests(on, Pulse()) is False, "there is no vLLM to import"
    assert FAULTS.counts["watching requests"] == 4
    kind = output_processor()
    assert watch_requests(on, Pulse(), kind)
    assert watch_requests(on, Pulse(), kind)
    processor = kind()
    processor.add_request(request("a", [1] * 32), None)
    processor.abort_requests(["a"], True)
    assert len(lines(on, tmp_path)) == 1


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
    assert what_is_seen(request("a", [1], priority="high"), wants_prefixes=True).priority is None, "a number or nothing"
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
