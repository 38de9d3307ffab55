"""OpenAI's own client against a stand-in, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.standin.config import ServerFlags
from tests.standin.servers import Server, standin


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standin(ServerFlags(api_keys=("secret",), max_num_queued_reqs=8)) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    import openai  # takes a second, which collecting the tests need not

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0) as found:
        yield found


def test_openais_own_client_reads_answers_and_streams(client: Any) -> None:
    """Chat and completions, whole and piece by piece, with usage."""
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=6, n=2)
    assert [choice.finish_reason for choice in chat.choices] == ["length", "length"]
    assert chat.usage.completion_tokens == 12
    text = client.completions.create(model="m", prompt="hi", max_tokens=6, logprobs=1)
    assert text.choices[0].text
    assert len(text.choices[0].logprobs.tokens) == 6
    assert [model.id for model in client.models.list()] == ["m"]
    asked = {"model": "m", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    pieces = list(client.completions.create(prompt="hi", **asked))
    assert pieces[-1].usage.total_tokens == 13
