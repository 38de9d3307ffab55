"""One GET of a server the user named, with a limit on everything: time, size, redirects, and what of the address is shown."""

from __future__ import annotations

import base64
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import IO, NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit, urlunsplit

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.net.inputs import HOST_AND_PORT, gunzip_whole

REDIRECTS_MAX = 3
URL_MAX = 8192
_CHUNK = 64 << 10
MOVED = (301, 302, 303, 307, 308)
Answer = TypeVar("Answer")


class Address(NamedTuple):
    """A server's address taken apart: what is asked, what is shown, and the name and password that go with it."""

    url: str  # without name and password
    shown: str  # without name, password and query: safe to print
    login: str | None  # for the Authorization header

    def at(self, path: str, query: str = "") -> Address:
        """Another path of the same server."""
        parts = urlsplit(self.url)
        url = urlunsplit((parts.scheme, parts.netloc, path, query, ""))
        return Address(url, urlunsplit((parts.scheme, parts.netloc, path, "", "")), self.login)


class Reply(NamedTuple):
    """What the server answered; also an error is an answer."""

    status: int
    body: bytes


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are ours to follow: urllib would take the password to whatever host it is sent to."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Not followed."""


def address(url: str) -> Address:
    """The address a user typed; one line of BadInput, without any password, if it is none."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadInput("the address cannot be read; write http://HOST:PORT") from None
    is_plain = all(character.isprintable() and not character.isspace() for character in url.strip())
    if parts.scheme not in ("http", "https") or not host or len(url) > URL_MAX or not is_plain:
        meant = f": http://{url.strip()}?" if re.fullmatch(HOST_AND_PORT, url.strip()) else ""
        raise BadInput(f"the address must be http://HOST:PORT or https://HOST:PORT, on one line{meant}")
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    login = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = "Basic " + base64.b64encode(pair.encode()).decode()
    clean = SplitResult(parts.scheme, netloc, parts.path, parts.query, "")
    return Address(urlunsplit(clean), urlunsplit(clean._replace(query="")), login)


def get(where: Address, *, most_bytes: int, timeout_s: float) -> Reply:
    """The answer, unpacked if it was gzip, within `timeout_s` whatever happens; errors name the address as it may be shown."""
    late = f"{where.shown}: did not answer within {timeout_s:g} s"
    return within(timeout_s, lambda: _exchange(where, most_bytes, timeout_s), late)


def within(seconds: float, ask: Callable[[], Answer], late: str) -> Answer:
    """What it returns or raises; TimedOut with these words if that takes longer.

    A thread, because neither the lookup of a name nor a server that sends its headers byte by byte minds a socket's timeout.
    """
    outcome: list[Answer | Exception] = []

    def run() -> None:
        try:
            outcome.append(ask())
        except Exception as error:  # handed over to whoever waits, and raised there
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimedOut(late)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _exchange(where: Address, most_bytes: int, timeout_s: float) -> Reply:
    opener = urllib.request.build_opener(NoRedirect)
    deadline = time.monotonic() + timeout_s
    url = where.url
    for _ in range(REDIRECTS_MAX + 1):
        request = urllib.request.Request(  # noqa: S310 # `address` and `_follow` allow http and https only
            url, headers={"User-Agent": "plimsoll", "Accept-Encoding": "identity"}
        )
        if where.login is not None:
            request.add_unredirected_header("Authorization", where.login)
        try:
            with opener.open(request, timeout=timeout_s) as response:
                body = read_up_to(response, most_bytes + 1, deadline)
                if len(body) > most_bytes:
                    raise TooLarge(f"{where.shown}: answers with more than {most_bytes >> 20} MiB")
                return Reply(response.status, gunzip_whole(body, most_bytes, where.shown))
        except urllib.error.HTTPError as error:
            with error:
                target = error.headers.get("Location")
                if error.code not in MOVED or target is None:
                    return Reply(error.code, error.read(_CHUNK))
            url = _follow(url, target, where)
        except (OSError, HTTPException, ValueError) as error:
            raise failure(error, timeout_s, f"{where.shown}: ") from None
    raise WorldFailed(f"{where.shown}: redirects more than {REDIRECTS_MAX} times")


def _follow(url: str, target: str, where: Address) -> str:
    try:
        old, new = urlsplit(url), urlsplit(urljoin(url, target))
        same = new.hostname == old.hostname and new.username is None
        same = same and ((new.scheme, new.port) == (old.scheme, old.port) or (old.scheme, new.scheme) == ("http", "https"))
    except ValueError:
        same = False
    if not same:
        raise WorldFailed(f"{where.shown}: redirects to another host; ask that one directly")
    return urlunsplit(new)


def read_up_to(response: IO[bytes], most: int, deadline: float) -> bytes:
    """So many bytes of the answer at the most, and no more than come before the deadline."""
    pieces: list[bytes] = []
    missing = most
    while missing > 0 and (piece := response.read(min(_CHUNK, missing))):
        pieces.append(piece)
        missing -= len(piece)
        if time.monotonic() > deadline:  # nobody waits any longer
            break
    return b"".join(pieces)


def failure(error: Exception, timeout_s: float, before: str = "") -> WorldFailed:
    """What went wrong, in words that go on from the server's name."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return TimedOut(f"{before}did not answer within {timeout_s:g} s")
    if isinstance(reason, OSError):
        return WorldFailed(f"{before}cannot be reached ({reason.strerror or type(reason).__name__})")
    return WorldFailed(f"{before}answered something that is not HTTP ({type(reason).__name__})")
