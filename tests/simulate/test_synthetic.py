"""Generated traffic: seeded, as long and as often as asked, sharing what it should."""

from __future__ import annotations

import contextlib
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.simulate.trace import Trace
from plimsoll.simulate.traffic import Synthetic, generate, parse_synthetic
from tests.each import each

CHAT = Synthetic(requests=4000, families=3, family_tokens=100, turns=4, block=16, priorities=3, prompt_max=4096)


def digest(trace: Trace) -> str:
    """Of every number in it."""
    columns = (trace.arrival_ns, trace.prompt, trace.output, trace.priority, trace.prefix_ids, trace.prefix_start)
    return hashlib.sha256(b"".join(column.astype("<i8").tobytes() for column in columns)).hexdigest()[:16]


def test_the_same_seed_is_the_same_trace() -> None:
    """Twice, on another machine and after an upgrade: a trace named in a report is that trace. Each quantity has own dice."""
    bursty = CHAT._replace(arrivals="bursty", seed=9)
    for spec, made_once in ((Synthetic(), "4784f5aef68f9f70"), (bursty, "5baf237ca7d38f5c"), (CHAT, digest(generate(CHAT)))):
        assert digest(generate(spec)) == made_once
        assert digest(generate(spec._replace(seed=spec.seed + 1))) != made_once
    one, other = generate(Synthetic(seed=5)), generate(Synthetic(seed=5, output=30, priorities=4))
    assert (one.arrival_ns.tolist(), one.prompt.tolist()) == (other.arrival_ns.tolist(), other.prompt.tolist())
    assert one.output.mean() > other.output.mean()


def test_means_and_bounds_are_as_asked() -> None:
    """Rate, lengths and limits within what chance allows; no ids where nothing is shared."""
    spec = Synthetic(requests=50_000, rate=40, prompt=800, prompt_sigma=0.5, output=100, output_sigma=0.5)
    trace = generate(spec)
    assert trace.arrival_ns[0] == 0
    assert trace.arrival_ns[-1] / 1e9 == pytest.approx(1250, rel=0.03)
    assert trace.prompt.mean() == pytest.approx(800, rel=0.02)
    assert trace.output.mean() == pytest.approx(100, rel=0.02)
    assert (trace.prompt.max() <= spec.prompt_max, trace.output.min() >= 1) == (True, True)
    assert not trace.shares_content
    alike = generate(Synthetic(requests=10, prompt_sigma=0, output_sigma=0, arrivals="constant", rate=4))
    assert (set(alike.prompt.tolist()), set(alike.output.tolist())) == ({1000}, {250})
    assert set(np.diff(alike.arrival_ns).tolist()) == {250_000_000}
    assert generate(Synthetic(requests=10, arrivals="at-once")).arrival_ns.max() == 0


def test_families_share_whole_blocks_of_their_beginning() -> None:
    """Each request begins with one of the shared beginnings, and with nothing else that another has."""
    trace = generate(Synthetic(requests=500, families=3, family_tokens=100, block=16, prompt_max=2000))
    assert trace.prompt.min() > 100
    beginnings = {tuple(trace.ids_of(i)[:6].tolist()) for i in range(trace.size)}
    assert len(beginnings) == 3
    own = [set(trace.ids_of(i)[6:].tolist()) for i in range(trace.size)]
    assert all(len(one) <= 1 for one in own)
    assert len(set().union(*own)) == sum(map(len, own))
    assert np.diff(trace.prefix_start).tolist() == (-(-trace.prompt // 16)).tolist()


def test_later_turns_repeat_the_conversation() -> None:
    """A turn that goes on begins with the whole prompt before it, is longer, and comes later."""
    trace = generate(CHAT)
    assert trace.size == 4000
    assert (trace.prompt.max() <= 4096, trace.priority.min(), trace.priority.max()) == (True, 0, 2)
    assert np.all(np.diff(trace.arrival_ns) >= 0)
    threads: dict[int, list[int]] = {}
    for request in range(trace.size):
        if len(trace.ids_of(request)) > 6:
            threads.setdefault(int(trace.ids_of(request)[-1]), []).append(request)
    assert sum(len(thread) > 1 for thread in threads.values()) > 500
    for thread in threads.values():
        for before, after in itertools.pairwise(thread):
            assert trace.prompt[after] > trace.prompt[before] + trace.output[before]
            assert trace.ids_of(after)[: len(trace.ids_of(before))].tolist() == trace.ids_of(before).tolist()


def test_a_specification_reads_like_a_file_name() -> None:
    """Every key lands in its field; what is not said keeps its default."""
    text = "synthetic:requests=10,rate=2.5,prompt=100, output=20,prompt_sigma=0,output_sigma=0.5,prompt_max=900,output_max=90"
    more = ",seed=7,arrivals=bursty,burstiness=0.5,families=2,family_tokens=64,turns=3,think=1.5,block=32,priorities=2"
    spec = Synthetic(10, 2.5, "bursty", 0.5, 100, 0, 20, 0.5, 900, 90, 2, 64, 3, 1.5, 32, 2, 7)
    assert parse_synthetic(text + more) == spec
    assert parse_synthetic("synthetic:") == Synthetic()
    assert generate(spec).size == 10


@each(
    ("text", "said"),
    [
        ("synthetic:speed=1", "'speed' is not one of requests"),
        ("synthetic:rate", "'rate' is not one of"),
        ("synthetic:rate=fast", "is not a number"),
        ("synthetic:requests=1.5", "is not a whole number"),
        ("synthetic:requests=0", "requests must lie between"),
        ("synthetic:requests=1,requests=2", "given twice"),
        ("synthetic:rate=nan", "rate must lie between"),
        ("synthetic:prompt=inf", "prompt must lie between"),
        ("synthetic:arrivals=weekly", "arrivals is one of"),
        ("synthetic:families=2,family_tokens=9000", "family_tokens must be below prompt_max"),
        ("synthetic:requests=1000000,rate=1e-9", "hundred years"),
        ("synthetic:requests=300000,turns=2,block=1", "prefix ids"),
    ],
)
def test_a_bad_specification_is_one_line(text: str, said: str) -> None:
    """The key, and what it may be."""
    with pytest.raises(BadInput) as caught:
        generate(parse_synthetic(text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


KEYS = st.sampled_from(
    "requests rate prompt output prompt_sigma prompt_max families family_tokens turns think block seed".split()
)
VALUES = st.one_of(st.integers(-2, 3000).map(str), st.sampled_from(["", "nan", "1e400", "0.5", "=", "x"]))


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6))
def test_any_specification_is_a_trace_or_one_line(pairs: list[tuple[str, str]]) -> None:
    """Nothing but BadInput comes out, and a trace has what the replay relies on."""
    with contextlib.suppress(BadInput):
        trace = generate(parse_synthetic("synthetic:" + ",".join(f"{key}={value}" for key, value in pairs)))
        assert trace.arrival_ns[0] == 0
        assert trace.prefix_start[-1] == len(trace.prefix_ids)
        assert trace.prompt.min() >= 1
