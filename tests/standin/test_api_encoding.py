"""Long texts: the same tokens, and nobody else waits for them."""

from __future__ import annotations

import threading
import time

import pytest

from plimsoll.standin.request import encode
from plimsoll.standin.serve.generation import LONG, encoded_in_pieces
from tests.standin.servers import Server, standin


@pytest.mark.parametrize(
    "text", ["", "one", "a few  words\n\n\tand_some longerwordsthaneight, and marks!  ", "x" * 50, " " * 40]
)
def test_a_text_in_pieces_has_the_same_tokens(text: str) -> None:
    """Wherever it is cut."""
    for size in range(1, 20):
        assert encoded_in_pieces(text, size) == encode(text)


def test_a_long_text_does_not_hold_up_the_server() -> None:
    """/health answers soon while four megabytes are taken apart."""
    text = "some words of it, " * (4_000_000 // 18)
    assert len(text) > LONG
    with standin() as server:
        thread = threading.Thread(target=server.ask, args=("POST", "/tokenize", {"prompt": text}))
        thread.start()
        slowest = _slowest(server, thread)
    assert slowest < 1.0


def _slowest(server: Server, thread: threading.Thread) -> float:
    slowest = 0.0
    while thread.is_alive():
        began = time.monotonic()
        assert server.ask("GET", "/health").status == 200
        slowest = max(slowest, time.monotonic() - began)
    return slowest
