"""Log probabilities in vLLM's shapes. No model is behind them: they are drawn from the token, the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.standin.text import RESERVED, piece

STRIDE = 389  # between the tokens that are named beside the drawn one


def _ranked(token: int, count: int) -> list[tuple[int, float]]:
    """The drawn token first, then as many others, each less likely."""
    first = -0.05 - (token * 7919 % 1000) / 1000
    return [((token + place * STRIDE) % RESERVED if place else token, first - 0.75 * place) for place in range(max(1, count))]


def of_completion(ids: Sequence[int], count: int, offset: int, *, is_beginning: bool = False) -> dict[str, Any]:
    """As /v1/completions shows them; `offset` is where in the text the first token begins.

    The very beginning of a prompt follows from nothing: it has none.
    """
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for place, token in enumerate(ids):
        text, ranked = piece(token), _ranked(token, count)
        is_first = is_beginning and place == 0
        found["text_offset"].append(offset)
        found["token_logprobs"].append(None if is_first else ranked[0][1])
        found["tokens"].append(text)
        found["top_logprobs"].append(None if is_first else {piece(other): value for other, value in ranked})
        offset += len(text)
    return found


def of_prompt(ids: Sequence[int], count: int) -> list[dict[str, Any] | None]:
    """Of a prompt's tokens: nothing for the first."""
    shown: list[dict[str, Any] | None] = [None]
    for token in ids[1:]:
        ranked = _ranked(token, count)
        shown.append(
            {
                str(other): {"logprob": value, "rank": place + 1, "decoded_token": piece(other)}
                for place, (other, value) in enumerate(ranked)
            }
        )
    return shown


def of_chat(ids: Sequence[int], count: int) -> dict[str, Any]:
    """As /v1/chat/completions shows them."""
    return {"content": [{**_one(token, ranked[0][1]), "top_logprobs": [_one(*other) for other in ranked[:count]]}
                        for token in ids for ranked in (_ranked(token, count),)]}  # fmt: skip


def _one(token: int, value: float) -> dict[str, Any]:
    text = piece(token)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
