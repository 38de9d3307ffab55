"""The layer that sheds: beneath authentication, never holding a body back, counting items however they are cut."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import App, Message, Receive, Scope, Send, error, send_answer
from plimsoll.inside.door import Passage
from plimsoll.inside.gate import ShedLayer, insert_beneath, items_in
from plimsoll.inside.gate_control import GateControl
from tests.fakes import ask, hello, http_scope
from tests.inside.test_gate_control import feed, made


class Middleware:
    """As starlette's are: it keeps what it stands around in `app`."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class Key(Middleware):
    """Refuses who does not show the key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (b"x-key", b"yes") not in scope["headers"]:
            await send_answer(send, error(401, "no", "AuthenticationError"))
        else:
            await self.app(scope, receive, send)


class Router:
    """The end of the chain, which may have an app of its own."""

    def __init__(self, app: Any = None) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, send)


def full(folder: Path) -> GateControl:
    core, client = made(folder, PLIMSOLL_SHED_WAIT_S="0.01")
    for number in range(50):
        client.add(str(number), 10_000)
    feed(core, 4, 46)
    return core


def test_the_layer_goes_beneath_all_middlewares(tmp_path: Path) -> None:
    """Whoever lacks the key is told so, not that the server is full."""
    core = full(tmp_path)
    chain = Middleware(Key(Middleware(Router(hello))))
    assert insert_beneath(chain, core)
    assert asyncio.run(ask(chain, "POST", "/v1/completions")).status == 401
    refused = asyncio.run(ask(chain, "POST", "/v1/completions", headers=[(b"x-key", b"yes")]))
    assert refused.status == 503
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert asyncio.run(ask(chain, "GET", "/v1/models", headers=[(b"x-key", b"yes")])).status == 200
    assert asyncio.run(ask(chain, "POST", "/sleep", headers=[(b"x-key", b"yes")])).status == 200
    assert isinstance(chain.app.app.app, Middleware | ShedLayer)  # type: ignore[attr-defined]


def test_it_goes_around_what_answers_exceptions_and_leaves_alone_a_chain_without_an_end() -> None:
    """A raising handler is turned into an answer beneath the layer; a ring of middlewares, or what has no app, stays."""

    class ExceptionMiddleware(Middleware):
        """Starlette's name for it."""

    core: Any = object()
    chain = Middleware(ExceptionMiddleware(hello))
    assert insert_beneath(chain, core)
    assert type(chain.app) is ShedLayer
    assert type(chain.app.app) is ExceptionMiddleware
    ring = Middleware(hello)
    ring.app = ring
    assert not insert_beneath(ring, core)
    assert not insert_beneath(object(), core)
    assert ring.app is ring


def test_a_body_is_handed_on_chunk_by_chunk(tmp_path: Path) -> None:
    """A slow sender: the app has each chunk before the next one is sent, and refusing reads none."""

    async def go() -> None:
        core, _ = made(tmp_path)
        seen: list[bytes] = []
        line: asyncio.Queue[Message] = asyncio.Queue()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while True:
                message = await receive()
                seen.append(message["body"])
                if not message["more_body"]:
                    return await hello(scope, receive, send)

        async def send(message: Message) -> None:
            del message

        task = asyncio.create_task(ShedLayer(app, core)(http_scope("POST", "/v1/completions"), line.get, send))
        for number in range(5):
            line.put_nowait({"type": "http.request", "body": b"%d" % number, "more_body": number < 4})
            await asyncio.sleep(0.005)
            assert len(seen) == number + 1
            assert core.in_layer == 0  # a body that is still being sent takes nobody's place
        await task
        await ShedLayer(app, full(tmp_path))(http_scope("POST", "/v1/completions"), line.get, send)  # nothing more is sent

    asyncio.run(asyncio.wait_for(go(), 5))


PARTS = [
    {"type": "image_url", "image_url": {"url": "data:"}},
    {"type": "input_audio", "input_audio": {"data": ""}},
    {"type": "text", "text": 'say "type": "image_url" to me'},
    {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "input_image", "image_url": "x"},
    {"role": "user", "name": "image_url"},
]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=6),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", " :  ")]),
    cuts=st.lists(st.integers(0, 600), max_size=30),
    every=st.booleans(),
)
def test_any_cutting_of_a_body_counts_the_same(
    parts: list[Any], separators: tuple[str, str], cuts: list[int], every: bool
) -> None:
    """Byte by byte or whole: each image, video and sound once, and no word in a text."""
    body = json.dumps({"messages": [{"content": parts}]}, separators=separators).encode()
    places = sorted(range(len(body)) if every else {cut for cut in cuts if cut < len(body)})
    chunks = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
    core: Any = SimpleNamespace(items=0, in_layer=0, answering=0, shed=lambda _: None, passage=Passage, can_fail_over=False)
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal most
        while (await receive())["more_body"]:
            pass
        most = core.items
        await hello(scope, receive, send)

    asyncio.run(ask(ShedLayer(app, core), "POST", "/v1/chat/completions", chunks))
    expected = sum(part.get("type", "text") != "text" for part in parts)
    assert most == items_in(body) == expected
    assert (core.items, core.in_layer, core.answering) == (0, 0, 0)


def _answering(status: int, *headers: tuple[bytes, bytes]) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_503_of_vllm_s_own_gets_a_retry_after(tmp_path: Path) -> None:
    """One that has it keeps it; other answers get none."""
    core, _ = made(tmp_path)
    for app, expected in (
        (_answering(503), "1"),
        (_answering(503, (b"Retry-After", b"77")), None),
        (_answering(429), None),
        (_answering(200), None),
    ):
        found = asyncio.run(ask(ShedLayer(app, core), "POST", "/v1/completions"))
        assert found.headers.get("retry-after") == expected
    core = full(tmp_path)
    core.settings.shed_wait_s = None
    assert asyncio.run(ask(ShedLayer(_answering(503), core), "POST", "/v1/completions")).headers["retry-after"] == "120"


def test_a_request_is_answering_from_the_start_of_its_answer_to_its_end(tmp_path: Path) -> None:
    """Whatever it sends after that; a websocket from the moment it is taken."""
    core, _ = made(tmp_path)
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        seen.append(core.answering)
        kinds = ("http.response.start", "http.response.body", "http.response.body")
        for kind in kinds if scope["type"] == "http" else ("websocket.accept", "websocket.send"):
            await send({"type": kind, "status": 200, "headers": []})
            seen.append(core.answering)

    async def send(message: Message) -> None:
        del message

    async def receive() -> Message:
        return {"type": "http.request"}

    layer = ShedLayer(app, core)
    asyncio.run(layer(http_scope("POST", "/v1/completions"), receive, send))
    asyncio.run(layer({**http_scope("GET", "/v1/realtime"), "type": "websocket"}, receive, send))
    assert seen == [0, 1, 1, 1, 0, 1, 1]
    assert core.answering == 0
