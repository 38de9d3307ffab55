"""Sends requests to a local server from threads, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import random
import struct
import threading
import time
import urllib.error
import urllib.request
import zlib
from typing import Any

# No proxy, whatever the environment says: the server is on this machine.
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(port: int, method: str, path: str, body: object = None, seconds: float = 10.0) -> tuple[int, str]:
    """The status and the text of one answer; 0 and the reason where there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with _HTTP.open(request, timeout=seconds) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except Exception as error:  # a server that dies answers in many ways
        return 0, repr(error)


def picture(side: int) -> str:
    """A square picture of coloured stripes, as a chat message holds one."""
    stripes = [b"\0" + bytes((3 * x + y) % 256 for x in range(3 * side)) for y in range(min(side, 256))]
    rows = b"".join(stripes[y % 256] for y in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


class Load:
    """A burst of requests, all sent at once: {"n": 20, "prompt": [100, 200], "out": [8, 16], "extra": {...}}.

    With "pictures" (how many in each, "side" pixels wide and high) they are chats, and the prompt is a word.
    """

    def __init__(self, port: int, spec: dict[str, Any]) -> None:
        dice, side = random.Random(spec.get("seed", 0)), spec.get("side", 8)
        self.spec, self.began, self.ended = spec, time.monotonic(), 0.0
        self.answers: list[tuple[int, str]] = []
        self.threads = []
        for _ in range(spec["n"]):
            body: dict[str, Any] = {"model": "m"}
            if "pictures" in spec:
                urls = [picture(side + number) for number in range(spec["pictures"])]
                parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
                body["messages"] = [{"role": "user", "content": [*parts, {"type": "text", "text": "ship"}]}]
            else:
                body["prompt"] = [dice.randrange(3, 2000) for _ in range(dice.randint(*spec["prompt"]))]
            body |= {"max_tokens": dice.randint(*spec["out"]), "ignore_eos": True, "temperature": 0, **spec.get("extra", {})}
            self.threads.append(threading.Thread(target=self._one, args=(port, body), daemon=True))
        for thread in self.threads:
            thread.start()

    def _one(self, port: int, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        self.answers.append(ask(port, "POST", path, body, 300.0))
        self.ended = time.monotonic()

    def busy(self) -> bool:
        """Whether an answer is still awaited."""
        return any(thread.is_alive() for thread in self.threads)

    def row(self) -> dict[str, Any]:
        """What came of it."""
        failed = [(status, text[:300]) for status, text in self.answers if status != 200]
        seconds = round(max(0.0, self.ended - self.began), 2)
        return {
            "n": self.spec["n"],
            "answered": len(self.answers),
            "failed": len(failed),
            "first": failed[:2],
            "seconds": seconds,
        }
