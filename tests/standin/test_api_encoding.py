"""Long texts: the same tokens, and nobody else waits for them."""

from __future__ import annotations

import threading

import pytest

from plimsoll.standin.request import encode
from plimsoll.standin.serve.generation import LONG, encoded_in_pieces
from tests.standin.servers import standin


@pytest.mark.parametrize(
    "text", ["", "one", "a few  words\n\n\tand_some longerwordsthaneight, and marks!  ", "x" * 50, " " * 40]
)
def test_a_text_in_pieces_has_the_same_tokens(text: str) -> None:
    """Wherever it is cut."""
    for size in range(1, 20):
        assert encoded_in_pieces(text, size) == encode(text)


def test_a_long_text_does_not_hold_up_the_server() -> None:
    """/health answers again and again while four megabytes are taken apart."""
    text = "some words of it, " * (4_000_000 // 18)
    assert len(text) > LONG
    with standin() as server:
        thread = threading.Thread(target=server.ask, args=("POST", "/tokenize", {"prompt": text}))
        thread.start()
        answers = 0
        while thread.is_alive():
            assert server.ask("GET", "/health").status == 200
            answers += 1
    assert answers >= 10
