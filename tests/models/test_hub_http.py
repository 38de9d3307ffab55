"""What one request to the hub promises, whatever the server does: it ends in time, within bounds, in one line."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.models.hub import Hub
from tests.models.hub_server import Handler, Server, hub_of

pytestmark = pytest.mark.usefixtures("no_proxy")


def test_no_token_goes_over_http_to_another_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by a proxy, as anybody on the way would see it."""
    monkeypatch.setenv("http_proxy", server.url)
    server.acts["config.json"] = lambda h: h.refuse(404, "")
    with pytest.raises(BadInput, match=r"not on hub\.test"):
        Hub("http://hub.test", token="hf_secret").read("org/name")
    assert [token for _, token, _ in server.seen] == [None]


def _slow(handler: Handler) -> None:
    time.sleep(0.6)
    handler.serve(b"{}")


def _trickle(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def _headers_without_end(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    for _ in range(40):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def _not_http(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (_slow, TimedOut, "did not answer within 0.2 s"),
        (_trickle, TimedOut, "did not answer within 0.8 s"),
        (_headers_without_end, TimedOut, "did not answer within 0.8 s"),
        (_not_http, WorldFailed, "not HTTP"),
        (lambda h: h.answer(200, b"{", Content_Length="50"), WorldFailed, "truncated answer"),
        (lambda h: h.answer(200, b"\x1f\x8b", Content_Encoding="gzip"), WorldFailed, "compressed"),
        (lambda h: h.answer(200, b"", Content_Length=str(10**10)), TooLarge, "more than"),
        (lambda h: h.answer(302, b"", Location="file:///etc/passwd"), WorldFailed, "not https"),
        (lambda h: h.answer(302, b"", Location="ftp://127.0.0.1/x"), WorldFailed, "not https"),
        (lambda h: h.answer(302, b"", Location=h.path), WorldFailed, "redirects more than 5 times"),
        (lambda h: h.answer(302, b""), WorldFailed, "answered 302"),
        (lambda h: h.serve(b"<html>"), BadInput, "not JSON"),
    ],
)
def test_a_misbehaving_hub_is_one_line(
    server: Server, act: Callable[[Handler], None], error: type[Exception], says: str
) -> None:
    """Slow, cut off, lying, compressed, redirecting in circles: each ends in time and says what happened."""
    server.acts["config.json"] = act
    with pytest.raises(error) as caught:
        hub_of(server, timeout_s=0.2).read("org/name")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_body_without_a_length_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not say how much it sends is not heard out for ever."""
    monkeypatch.setattr("plimsoll.models.hub.CONFIG_MAX_BYTES", 1000)

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b" " * 100_000)

    server.acts["config.json"] = endless
    with pytest.raises(TooLarge, match="more than 1,000 bytes"):
        hub_of(server).read("org/name")


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="bytes 5-12/100"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="bytes 0-99/100"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="nonsense"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02", Content_Range="bytes 0-7/100", Content_Length="8"), WorldFailed, "truncated answer"),
        (lambda h: h.answer(206, b"\xff" * 8, Content_Range="bytes 0-7/100"), BadInput, "not a safetensors file"),
        (lambda h: h.answer(206, b"\x40" + bytes(7), Content_Range="bytes 0-7/20"), BadInput, "cut short"),
        (lambda h: h.refuse(416, ""), WorldFailed, "answered 416"),
    ],
)
def test_a_lie_about_a_part_is_found_out(
    server: Server, act: Callable[[Handler], None], error: type[Exception], says: str
) -> None:
    """Another range than asked for, fewer bytes, a header longer than the file."""
    server.acts["model.safetensors"] = act
    with pytest.raises(error) as caught:
        hub_of(server).read("org/name")
    assert says in str(caught.value)
