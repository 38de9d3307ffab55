"""Words and ids: equal text is equal content in every process, and an answer can be read back."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.simulate.settings import EngineLimits
from plimsoll.standin.request import RESERVED, VOCABULARY, WORDS, content_ids, draw, encode
from plimsoll.standin.serve.generation import LONG
from tests.standin.engines import engine
from tests.standin.servers import standin

PROSE = (
    "The load line is painted on both sides of the hull. It shows how deep a ship may lie in the water of each season, and a "
    "harbour master who finds it under water keeps the ship where it is until something is taken off again."
)


@given(st.integers(0, 2**40), st.integers(0, 300))
def test_an_answer_reads_back_as_the_tokens_it_was_made_of(seed: int, count: int) -> None:
    """The next turn of a chat holds it as text, and must find its blocks."""
    ids = draw(seed, count)
    assert encode("".join(WORDS[token] for token in ids.tolist())) == ids.tolist()
    assert all(0 <= token < RESERVED for token in ids.tolist())


@given(st.text(max_size=200))
def test_any_text_has_ids_of_the_vocabulary(text: str) -> None:
    """Whatever is typed, twice the same."""
    ids = encode(text)
    assert ids == encode(text)
    assert all(0 <= token < VOCABULARY for token in ids)


def test_ids_do_not_depend_on_the_process_and_prose_is_about_four_letters_a_token() -> None:
    """As with the tokenisers of real models, within a third."""
    assert encode("a tale of two cities") == [30907, 22393, 7999, 13630, 18354]
    assert draw(7, 3).tolist() == draw(7, 5).tolist()[:3]
    assert draw(7, 8).tolist() != draw(8, 8).tolist()
    assert 3.0 < len(PROSE) / len(encode(PROSE)) < 6.0


def test_content_is_told_by_every_token_and_its_place() -> None:
    """One token changed or two exchanged change the block's number, and no other block's."""
    tokens = np.arange(64, dtype=np.int64)
    before = content_ids(tokens, 16).tolist()
    assert len(before) == len(set(before)) == 4
    changed, swapped = tokens.copy(), tokens.copy()
    changed[20] += 1
    swapped[[20, 21]] = swapped[[21, 20]]
    for other in (changed, swapped):
        after = content_ids(other, 16).tolist()
        assert [one == two for one, two in zip(before, after, strict=True)] == [True, False, True, True]
    assert content_ids(tokens[:15], 16).tolist() == []


def test_a_long_text_does_not_hold_up_the_server() -> None:
    """/health answers again and again while twelve megabytes are taken apart."""
    text = "some words of it, " * (12_000_000 // 18)
    assert len(text) > LONG
    limits = EngineLimits(num_blocks=256, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1_500_000)
    with standin(one=engine(settings=limits)) as server:
        thread = threading.Thread(target=server.ask, args=("POST", "/v1/completions", {"prompt": text}))
        thread.start()
        answers = 0
        while thread.is_alive():
            assert server.ask("GET", "/health").status == 200
            answers += 1
    assert answers >= 10
