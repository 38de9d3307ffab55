"""One GET with a limit on everything: time, size, redirects, and who is shown the token."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import IO, NamedTuple
from urllib.parse import urljoin, urlsplit

from plimsoll.errors import TooLarge, WorldFailed
from plimsoll.sources.http_get import MOVED, NoRedirect, failure, read_up_to, within

REDIRECTS_MAX = 5
_PATIENCE = 4  # a whole answer may take that many times the timeout of a single read
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Refused(Exception):  # never shown: `hub` turns it into a sentence
    """The server answered with an error."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class Answer(NamedTuple):
    """The bytes that were asked for, the size of the whole file and the commit it belongs to, where the server says them."""

    body: bytes
    total_bytes: int | None
    commit: str | None


def get(url: str, *, token: str | None, most_bytes: int, part: tuple[int, int] | None, timeout_s: float) -> Answer:
    """The file at `url`, or its bytes from `part[0]` up to `part[1]`, within four times `timeout_s` whatever happens."""
    late = f"did not finish its answer within {_PATIENCE * timeout_s:g} s"
    return within(
        _PATIENCE * timeout_s,
        lambda: _exchange(url, token=token, most_bytes=most_bytes, part=part, timeout_s=timeout_s),
        late,
    )


def _exchange(url: str, *, token: str | None, most_bytes: int, part: tuple[int, int] | None, timeout_s: float) -> Answer:
    opener = urllib.request.build_opener(NoRedirect)
    deadline = time.monotonic() + _PATIENCE * timeout_s
    home = url
    commit: str | None = None
    for _ in range(REDIRECTS_MAX + 1):
        headers = {"User-Agent": "plimsoll", "Accept-Encoding": "identity"}
        if part is not None:
            headers["Range"] = f"bytes={part[0]}-{part[1] - 1}"
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 # `_follow` and Hub allow http and https only
        if token is not None and may_see_token(url, home):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with opener.open(request, timeout=timeout_s) as response:
                commit = commit or _commit(response.headers)
                return _answer(response, response.status, response.headers, part, most_bytes, commit, deadline)
        except urllib.error.HTTPError as error:
            with error:
                commit = commit or _commit(error.headers)
                target = error.headers.get("Location")
                if error.code not in MOVED or target is None:
                    raise Refused(error.code, error.headers.get("X-Error-Code")) from None
            url = _follow(url, target)
        except (OSError, HTTPException, ValueError) as error:
            raise failure(error, timeout_s) from None
    raise WorldFailed(f"redirects more than {REDIRECTS_MAX} times")


def may_see_token(url: str, home: str) -> bool:
    """Whether the token may go to `url`: the hub's own host, over https; on this machine itself also over http."""
    one, two = urlsplit(url), urlsplit(home)
    same = (one.scheme, one.hostname, one.port) == (two.scheme, two.hostname, two.port)
    return same and (one.scheme == "https" or one.hostname in _LOOPBACK)


def _follow(url: str, target: str) -> str:
    joined = urljoin(url, target)
    old, new = urlsplit(url).scheme, urlsplit(joined).scheme
    if new not in ("http", "https") or (old == "https" and new == "http") or not urlsplit(joined).hostname:
        raise WorldFailed("redirects to an address that is not https")
    return joined


def _answer(
    response: IO[bytes],
    status: int,
    headers: Message,
    part: tuple[int, int] | None,
    most_bytes: int,
    commit: str | None,
    deadline: float,
) -> Answer:
    if headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise WorldFailed("answered compressed although asked not to; nothing is unpacked")
    stated = _whole(headers.get("Content-Length"))
    if part is None:
        if stated is not None and stated > most_bytes:
            raise TooLarge(f"{stated:,} bytes, more than any such file has")
        body = read_up_to(response, most_bytes + 1, deadline)
        if len(body) > most_bytes:
            raise TooLarge(f"more than {most_bytes:,} bytes, more than any such file has")
        if stated is not None and len(body) != stated:
            raise WorldFailed(f"broke off after {len(body):,} of {stated:,} bytes")
        return Answer(body, stated, commit)
    begin, end = part
    if status == 206:
        span = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", headers.get("Content-Range", ""))
        if span is None or int(span[1]) != begin or int(span[2]) >= end:
            raise WorldFailed("answered with another part of the file than was asked for")
        body, total = read_up_to(response, end - begin, deadline), int(span[3])
    else:  # the server knows no ranges: it sends the whole file, of which the beginning is enough
        body, total = read_up_to(response, end, deadline)[begin:], stated or 0
    if len(body) < min(end, total) - begin:
        raise WorldFailed(f"broke off after {len(body):,} of {end - begin:,} bytes")
    return Answer(body, total or None, commit)


def _commit(headers: Message) -> str | None:
    found = re.fullmatch(r"[0-9a-f]{7,64}", headers.get("X-Repo-Commit", ""))
    return found.group() if found else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,18}", text) else None
